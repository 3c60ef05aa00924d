"""Texts that are read into a conversation."""

from __future__ import annotations

import glob
import os
import shlex
from pathlib import Path

from mlx_linattn.errors import RequestError


def read_text(name: str) -> str:
    try:
        return Path(name).expanduser().read_text("utf-8")
    except OSError as error:
        raise RequestError(f"{name}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{name}: is not text (UTF-8); text, Markdown and source code can be read") from error


def matching(line: str) -> list[str]:
    """The files that a line of names and patterns means. Raises RequestError where one means none."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise RequestError(f"/read {line}: {error}") from error
    if not words:
        raise RequestError("/read wants one or more files, such as /read notes.md")
    names: list[str] = []
    for word in words:
        path = os.path.expanduser(word)
        found = [path] if os.path.exists(path) else sorted(glob.glob(path, recursive=True))
        files = [one for one in found if os.path.isfile(one)]
        if not files:
            folder = os.path.isdir(path)
            hint = f"is a folder: say which files, such as {os.path.join(word, '*.md')}" if folder else "no such file"
            raise RequestError(f"/read: {word}: {hint}")
        names += files
    return names


def in_one(documents: dict[str, str]) -> str:
    """One message with all of them, each below its name."""
    return "\n\n".join(f"{Path(name).name}:\n\n{content.strip()}" for name, content in documents.items())
