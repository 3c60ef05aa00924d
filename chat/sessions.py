"""Conversations on disk. Each has a private folder: its messages as JSON, and the model's state, which can be lost without harm.

    <data>/history                    lines typed at the prompt
    <data>/sessions/NAME/messages.json   written after every turn
    <data>/sessions/NAME/state.safetensors   written when the chat ends; without it the messages are read again

<data> is $MLX_LINATTN_DATA, or ~/Library/Application Support/mlx-linattn on a Mac, or mlx-linattn in $XDG_DATA_HOME.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import mlx_linattn as la
from mlx_linattn.errors import SessionFileError

KEPT_STATES = 5  # of conversations that nobody named; states are large


def data_folder() -> Path:
    if os.environ.get("MLX_LINATTN_DATA"):
        return Path(os.environ["MLX_LINATTN_DATA"]).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "mlx-linattn"
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "mlx-linattn"


@contextmanager
def private() -> Iterator[None]:
    """Files and folders made here are for their owner alone."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


@dataclass
class Record:
    """What is known of a conversation without its model."""

    name: str
    model: str = ""
    messages: list[dict] = field(default_factory=list)
    system: str | None = None
    template: dict = field(default_factory=dict)
    named: bool = False  # by a person
    saved: float = 0.0  # seconds since 1970
    read_tokens: int = 0  # the longest prompt read so far, and
    read_seconds: float = 0.0  # how long that took

    @property
    def title(self) -> str:
        """The first thing that was said."""
        text = next((str(one.get("content")) for one in self.messages if one.get("role") == "user"), "")
        return " ".join(text.split())


class Store:
    """The conversations in a folder."""

    def __init__(self, folder: Path | None = None):
        self.folder = (folder or data_folder()) / "sessions"

    def path(self, name: str) -> Path:
        if not name or name.startswith(".") or any(c in "/\\" or ord(c) < 32 for c in name) or len(name) > 100:
            raise SessionFileError(f"{name!r} cannot name a session: use letters, digits, spaces, - or _")
        return self.folder / name

    def names(self) -> list[str]:
        """The latest first."""
        found = list(self.folder.glob("*/messages.json")) if self.folder.is_dir() else []
        return [file.parent.name for file in sorted(found, key=lambda file: file.stat().st_mtime_ns, reverse=True)]

    def fresh_name(self) -> str:
        name = base = time.strftime("%Y-%m-%d-%H%M%S")
        n = 1
        while (self.folder / name).exists():
            name, n = f"{base}-{n}", n + 1
        return name

    def write(self, record: Record) -> None:
        """The messages, at once or not at all."""
        folder = self.path(record.name)
        record.saved = time.time()
        temporary = folder / f".messages.{os.getpid()}.partial"
        try:
            with private():
                folder.mkdir(parents=True, exist_ok=True)
                temporary.write_text(
                    json.dumps({"version": 1, **asdict(record)}, ensure_ascii=False, indent=1), "utf-8"
                )
                os.replace(temporary, folder / "messages.json")
        except OSError as error:
            raise SessionFileError(f"{folder}: cannot be written ({error.strerror or error})") from error

    def read(self, name: str) -> Record:
        """Raises SessionFileError where there is no such session, or it is damaged beyond its messages."""
        file = self.path(name) / "messages.json"
        try:
            data = json.loads(file.read_text("utf-8"))
            record = Record(**{key: data[key] for key in Record.__dataclass_fields__ if key in data})
            if not all(isinstance(one, dict) and "role" in one for one in record.messages):
                raise ValueError("its messages are no messages")
        except FileNotFoundError as error:
            raise SessionFileError(f"there is no session {name!r}: /load lists those there are") from error
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise SessionFileError(f"{file}: is damaged ({error})") from error
        record.name = name
        return record

    def write_state(self, name: str, session: la.Session) -> None:
        with private():
            session.save(self.path(name) / "state.safetensors")

    def load(self, name: str, model, tokenizer, **options) -> tuple[Record, la.Session, str]:
        """The record, a session that goes on where it ended, and in one line what was lost on the way ("" if nothing).

        The state is used if it is this model's; whatever it lacks is read at the next turn.
        """
        state = self.path(name) / "state.safetensors"
        notice, session = "", None
        try:
            record = self.read(name)
        except SessionFileError as error:
            if not state.exists():
                raise
            kept = la.Session.load(state, model, tokenizer, state=False)
            record, notice = (
                Record(name, "", kept.messages, kept.system, kept.template, True),
                f"{error}; used its copy",
            )
        options = {**record.template, **options}
        limits = {key: options[key] for key in ("memory_limit",) if key in options}
        if state.exists():
            try:
                session = la.Session.load(state, model, tokenizer, **limits)
            except SessionFileError as error:
                notice = f"{error}".partition(";")[0] + "; the messages are whole and will be read again"
        if session is None:
            session = la.Session(model, tokenizer, **options)
        session.system, session.messages = record.system, list(record.messages)
        session.template.update(record.template)
        return record, session, notice

    def remove_old_states(self) -> None:
        """Of conversations that nobody named, only the latest keep their states."""
        unnamed = []
        for name in self.names():
            with suppress(SessionFileError):
                if not self.read(name).named:
                    unnamed.append(name)
        for name in unnamed[KEPT_STATES:]:
            with suppress(OSError):
                (self.folder / name / "state.safetensors").unlink()

    def remove(self, name: str) -> None:
        shutil.rmtree(self.path(name), ignore_errors=True)
