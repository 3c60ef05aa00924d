"""Writes ``mlx_linattn/API.md`` from signatures and docstrings: ``python tests/api_page.py``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx_linattn
from mlx_linattn import errors, interop

PAGE = Path(mlx_linattn.__file__).parent / "API.md"
HEAD = """# mlx_linattn: every public name

Made from the docstrings by `python tests/api_page.py`; a test holds it to them. B is the batch, T tokens, V the vocabulary, H the hidden size.
Sizes are bytes and times seconds where nothing else is said. What else there is in the package may change without notice.
"""
ORDER = ("loading", "session", "engine", "generation", "sampling", "model", "state", "ops", "convert")


def sections() -> list[tuple[str, str, dict[str, Any]]]:
    """(title, what it is imported from, {name: object}) of all that is public."""
    homes = mlx_linattn._HOMES
    assert set(homes) == set(ORDER)
    found = [
        (_title(import_module(f"mlx_linattn.{home}")), "mlx_linattn", {n: getattr(mlx_linattn, n) for n in homes[home]})
        for home in ORDER
    ]
    mine = {name: one for name, one in vars(errors).items() if inspect.isclass(one)}
    return [
        *found,
        (_title(interop), "mlx_linattn.interop", {name: getattr(interop, name) for name in interop.__all__}),
        (_title(errors), "mlx_linattn.errors", mine),
    ]


def page() -> str:
    parts = [HEAD]
    for title, home, names in sections():
        parts.append(f"\n## {title}\n\n`from {home} import {', '.join(names)}`\n")
        for name, one in names.items():
            parts.append(f"\n### {name}\n\n{_code(name, one)}\n{_text(one)}\n")
            for label, member in members(one):
                parts.append(f"\n**`{label}`**\n\n{_text(member)}\n")
    return "".join(parts)


def members(one: Any) -> Iterator[tuple[str, Any]]:
    """The public methods and properties of a class of ours, its bases' of ours included, as (how it is written, object)."""
    if not inspect.isclass(one) or not _is_ours(one) or issubclass(one, Exception):
        return
    seen = set()
    for base in one.__mro__:
        if not _is_ours(base):
            continue
        for name, member in vars(base).items():
            if name in seen or (name.startswith("_") and name not in SPECIAL):
                continue
            seen.add(name)
            if isinstance(member, property):
                yield name, member.fget
            elif isinstance(member, (classmethod, staticmethod)) or inspect.isfunction(member):
                function = getattr(member, "__func__", member)
                yield f"{name}{signature(function, bound=not isinstance(member, staticmethod))}", function


SPECIAL = ("__call__",)


def signature(function: Any, bound: bool = False) -> str:
    """``(a: int, b: str = "") -> str``; without the first parameter where ``bound``."""
    found = inspect.signature(function)
    words, star = [], False
    for parameter in list(found.parameters.values())[bound:]:
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            words.append("*")
        star = star or parameter.kind in (parameter.VAR_POSITIONAL, parameter.KEYWORD_ONLY)
        text = stars + parameter.name
        annotated = parameter.annotation is not parameter.empty
        if annotated:
            text += f": {_annotation(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            text += f" = {_default(parameter.default)}" if annotated else f"={_default(parameter.default)}"
        words.append(text)
    returned = found.return_annotation
    arrow = "" if returned is found.empty or inspect.isclass(function) else f" -> {_annotation(returned)}"
    return f"({', '.join(words)}){arrow}"


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def _default(value: Any) -> str:
    text = repr(value)
    return "..." if text.startswith("<") else text  # a dataclass's default_factory


def _code(name: str, one: Any) -> str:
    if not callable(one) or not _is_ours(one):
        return ""
    kind = "class " if inspect.isclass(one) else ""
    error = inspect.isclass(one) and issubclass(one, Exception)
    text = f"({', '.join(base.__name__ for base in one.__bases__)})" if error else signature(one)
    return f"```python\n{kind}{name}{text}\n```\n"


def _is_ours(one: Any) -> bool:
    return getattr(one, "__module__", "").partition(".")[0] == "mlx_linattn"


def _text(one: Any) -> str:
    """A docstring as Markdown; its examples and lists keep their lines."""
    if not _is_ours(one):
        return "mlx_lm's own, under its name there."
    text = inspect.cleandoc(one.__doc__ or "")
    text = re.sub(r":\w+:`([^`]*)`", r"`\1`", text).replace("``", "`").replace("\nArgs:\n", "\n")
    # "name, other: what they are" is an entry of a list, and what is indented below belongs to it.
    text = re.sub(r"^ {0,4}([a-z]\w*(?:, [a-z]\w*)*): (?=\S)", r"- `\1`: ", text, flags=re.MULTILINE)
    return re.sub(r"^ {4,8}(?=\S)", "  ", text, flags=re.MULTILINE)


def _title(module: Any) -> str:
    return (module.__doc__ or "").strip().split("\n")[0].rstrip(".").replace("``", "`")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
