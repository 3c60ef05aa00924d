"""Tokenizers and chat templates, from transformers by way of mlx_lm's wrapper with its streaming detokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..errors import TokenizerError
from . import tiktoken
from .door import mlx_lm
from .sentencepiece import check_sentencepiece, sentencepiece_settings

_wrapper = mlx_lm("tokenizer_utils")
FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", tiktoken.RANKS)


class Tokenizer(_wrapper.TokenizerWrapper):
    """mlx_lm's TokenizerWrapper, but the chat template decides whether a model thinks unless the caller does.

    mlx_lm passes ``enable_thinking=True`` to every template whose tokenizer knows ``<think>``.
    """

    def apply_chat_template(self, *args, **kwargs):
        if "enable_thinking" in kwargs:
            return super().apply_chat_template(*args, **kwargs)
        kwargs.setdefault("return_dict", False)
        if self._chat_template is None:
            return self._tokenizer.apply_chat_template(*args, **kwargs)
        return super().apply_chat_template(*args, **kwargs)


def load_tokenizer(folder: Path, config: dict, extra: dict[str, Any] | None = None) -> Tokenizer:
    """The tokenizer of a model folder; ``config`` is the model's, for its end tokens.

    Raises TokenizerError where the folder has no tokenizer or a damaged one.
    """
    if not any((folder / name).exists() for name in FILES):
        raise TokenizerError(
            f"{folder}: has no tokenizer (none of {', '.join(FILES)}); copy the tokenizer files of the original model there"
        )
    if tiktoken.is_tiktoken(folder):
        with TemporaryDirectory() as converted:
            tiktoken.write(folder, Path(converted))
            return _load(Path(converted), end_tokens(folder, config), extra)
    return _load(folder, end_tokens(folder, config), extra)


def _load(folder: Path, ends: list[int] | None, extra: dict[str, Any] | None) -> Tokenizer:
    try:
        settings = {**sentencepiece_settings(folder), **(extra or {})}
        tokenizer = _wrapper.load(folder, settings, eos_token_ids=ends)
        check_sentencepiece(folder, tokenizer)
    except TokenizerError:
        raise
    except Exception as error:  # transformers and tokenizers raise bare Exceptions for damaged files
        reason = str(error).strip().split("\n")[0]
        raise TokenizerError(f"{folder}: its tokenizer cannot be loaded ({reason})") from error
    tokenizer.__class__ = Tokenizer
    return tokenizer


def end_tokens(folder: Path, config: dict) -> list[int] | None:
    """Ids that end an answer: generation_config.json's where it names some, else the config's."""
    file = folder / "generation_config.json"
    found = None
    if file.exists():
        try:
            found = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError) as error:
            raise TokenizerError(f"{file}: cannot be read ({error})") from error
    if found is None:
        found = config.get("eos_token_id", (config.get("text_config") or {}).get("eos_token_id"))
    return [found] if isinstance(found, int) else found
