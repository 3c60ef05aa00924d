"""tokenizer.json for a repository that has ``tiktoken.model`` and Python code instead (Kimi). The code is read, never run.

A rank file says which byte sequences are tokens; how text is cut into words before that, and how many ids are reserved
after the ranks, stand in the repository's tokenizer class, as ``pat_str`` and ``num_reserved_special_tokens``. Both are
literals, so that reading the syntax tree is enough. The merges are worked out by transformers' TikTokenConverter.
"""

from __future__ import annotations

import ast
import base64
import json
import re
from pathlib import Path
from typing import Any

from ..errors import TokenizerError
from ..weights.checkpoint import read_json

RANKS = "tiktoken.model"
CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"


def is_tiktoken(folder: Path) -> bool:
    """Whether the folder has a rank file and no tokenizer.json."""
    return (folder / RANKS).exists() and not (folder / "tokenizer.json").exists()


def write(source: Path, target: Path) -> None:
    """Write tokenizer.json and the tokenizer_config.json that belongs to it into ``target``; raises TokenizerError."""
    config = read_json(source / CONFIG, "a tiktoken tokenizer")
    tokenizer = convert(source)
    config = {key: value for key, value in config.items() if key != "auto_map"}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    target.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(target / "tokenizer.json"))
    (target / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")
    if (source / TEMPLATE).exists() and not (target / TEMPLATE).exists():
        (target / TEMPLATE).write_bytes((source / TEMPLATE).read_bytes())


def convert(folder: Path) -> Any:
    """The ``tokenizers.Tokenizer`` of a folder with a rank file; raises TokenizerError where something does not add up."""
    from tokenizers import AddedToken
    from transformers.convert_slow_tokenizer import TikTokenConverter

    config = read_json(folder / CONFIG, "a tiktoken tokenizer")
    ranks = read_ranks(folder / RANKS)
    pattern, reserved = read_class(folder, config)

    class Converter(TikTokenConverter):
        @staticmethod
        def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
            return ranks  # transformers asks the tiktoken package, which nothing else here needs

    try:
        tokenizer = Converter(str(folder / RANKS), pattern=pattern).converted()
    except Exception as error:  # tokenizers raises bare Exceptions
        raise TokenizerError(f"{folder}: its tokenizer cannot be converted ({error})") from error
    for token, id_ in _added(config, len(ranks), reserved):
        tokenizer.add_tokens([AddedToken(token["content"], normalized=False, special=token.get("special", True))])
        if tokenizer.token_to_id(token["content"]) != id_:
            raise TokenizerError(
                f"{folder / CONFIG}: added token {token['content']!r} has id {id_}, but the rank file already holds it"
            )
    return tokenizer


def _added(config: dict, base: int, reserved: int):
    """The tokens after the ranks, in order, with a placeholder for each id that the config does not name."""
    named = {int(id_): token for id_, token in (config.get("added_tokens_decoder") or {}).items()}
    for id_ in range(base, base + reserved):
        token = named.get(id_, f"<|reserved_token_{id_}|>")
        yield (token if isinstance(token, dict) else {"content": token}), id_


def read_ranks(file: Path) -> dict[bytes, int]:
    """Token -> rank of a rank file: a line ``base64 rank`` for each token."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise TokenizerError(f"{file}: cannot be read ({error.strerror})") from error
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(filter(None, lines), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise TokenizerError(f"{file}: line {number} is not 'base64 rank'; download the file again") from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise TokenizerError(f"{file}: its ranks do not count from 0 without gaps; download the file again")
    return ranks


def read_class(folder: Path, config: dict) -> tuple[str, int]:
    """(pattern that cuts text into words, number of ids after the ranks) from the source of the tokenizer class."""
    reference = (config.get("auto_map") or {}).get("AutoTokenizer")
    reference = reference[0] if isinstance(reference, list) else reference
    match = re.fullmatch(r"(?:.*--)?(\w+)\.(\w+)", reference or "")
    if not match:
        raise TokenizerError(
            f"{folder / CONFIG}: names no tokenizer class (auto_map), so that its rank file has no use"
        )
    file = folder / f"{match.group(1)}.py"
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        raise TokenizerError(f"{file}: cannot be read ({error}); it says how the tokenizer cuts text") from error
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == match.group(2):
            for statement in node.body:
                targets = statement.targets if isinstance(statement, ast.Assign) else []
                found |= {target.id: statement.value for target in targets if isinstance(target, ast.Name)}
    pattern, reserved = _text(found.get("pat_str")), _number(found.get("num_reserved_special_tokens"))
    if pattern is None or reserved is None:
        raise TokenizerError(
            f"{file}: pat_str and num_reserved_special_tokens of {match.group(2)} are not the literals that they "
            "are in Kimi's tokenizer; this version cannot convert it without running code, which it never does"
        )
    return pattern, reserved + 2  # Kimi's class reserves two more: begin and end of text


def _text(node: ast.expr | None) -> str | None:
    """A string literal, or ``"x".join([literals])``."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "join":
        glue, parts = _text(node.func.value), node.args[0] if len(node.args) == 1 else None
        pieces = [_text(part) for part in parts.elts] if isinstance(parts, (ast.List, ast.Tuple)) else [None]
        return None if glue is None or None in pieces else glue.join(pieces)
    value = node.value if isinstance(node, ast.Constant) else None
    return value if isinstance(value, str) else None


def _number(node: ast.expr | None) -> int | None:
    value = node.value if isinstance(node, ast.Constant) else None
    return value if type(value) is int else None
