"""What transformers must be told of a folder that has ``tokenizer.model`` and no ``tokenizer.json``.

It converts the sentencepiece file by itself, but takes special tokens, the space before a text and the token that begins
it from the tokenizer class's defaults, and a name the file does not have becomes an id beyond the model's vocabulary.
The file knows better, and tokenizer_config.json better still.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import TokenizerError

FILE = "tokenizer.model"
SPECIAL = ("bos", "eos", "unk", "pad")


def sentencepiece_settings(folder: Path) -> dict[str, Any]:
    """Keyword arguments for transformers; none where ``folder`` has a tokenizer.json or no sentencepiece file.

    Raises TokenizerError where tokenizer_config.json cannot be read.
    """
    file, ready = folder / FILE, folder / "tokenizer.json"
    if ready.exists() or not file.exists():
        return {}
    from sentencepiece import SentencePieceProcessor

    try:
        model = SentencePieceProcessor(model_file=str(file))
    except (OSError, RuntimeError):  # a tiktoken file can bear this name: transformers is the judge of it
        return {}
    settings: dict[str, Any] = {
        "add_bos_token": model.bos_id() >= 0,  # the rule for models with such a file, Gemma's and Llama's
        "add_prefix_space": model.encode("a", out_type=str)[0].startswith("▁"),
    }
    for name in SPECIAL:
        number = getattr(model, f"{name}_id")()
        if number >= 0:
            settings[f"{name}_token"] = model.id_to_piece(number)
    return {key: value for key, value in settings.items() if key not in _said(folder / "tokenizer_config.json")}


def check_sentencepiece(folder: Path, tokenizer) -> None:
    """Raises TokenizerError where transformers made something else of a sentencepiece file: 5.20 drops the space before a text."""
    if (folder / "tokenizer.json").exists() or _said(folder / "tokenizer_config.json").keys() & {
        "add_prefix_space",
        "legacy",
    }:
        return
    from sentencepiece import SentencePieceProcessor

    try:
        model = SentencePieceProcessor(model_file=str(folder / FILE))
    except (OSError, RuntimeError):
        return
    probe = "a b"
    if list(tokenizer.encode(probe, add_special_tokens=False)) != model.encode(probe):
        raise TokenizerError(
            f"{folder}: the installed transformers reads {FILE} wrongly; install a newer one (on Python 3.11 or later), "
            "or put the model's tokenizer.json beside it"
        )


def _said(file: Path) -> dict:
    if not file.exists():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{file}: cannot be read ({error})") from error
    return value if isinstance(value, dict) else {}
