"""The conversation that a chat is in: its session, and what is kept of it on disk."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx_linattn as la
from mlx_linattn.errors import LinAttnError, RequestError, SessionFileError

from .footer import Totals
from .sessions import Record, Store


class Conversation:
    """``load`` gives (model, tokenizer) of an id; ``store`` is None where nothing is to be kept; ``warn`` takes a sentence.

    Messages are written after every change, the state when the conversation is left.
    """

    def __init__(
        self, session: la.Session, model_id: str, store: Store | None = None,
        load: Callable[..., tuple] = la.load, warn: Callable[[str], None] = print, **session_options: Any,
    ):  # fmt: skip
        self.session, self.model_id, self.store, self.load, self.warn = session, model_id, store, load, warn
        self.session_options = session_options
        self.record = Record(self.fresh_name())
        self.totals = Totals()

    @property
    def model_name(self) -> str:
        return Path(self.model_id).name or self.model_id

    def fresh_name(self) -> str:
        return self.store.fresh_name() if self.store else "chat"

    def names(self) -> list[str]:
        """Of all kept conversations, the latest first."""
        return self.store.names() if self.store else []

    @property
    def measured(self) -> tuple[int, float]:
        """The longest prompt that was read in one go, in this chat or earlier in this conversation: (tokens, seconds)."""
        before = (self.record.read_tokens, self.record.read_seconds)
        return max(before, (self.totals.longest_read, self.totals.longest_seconds))

    # Keeping

    def autosave(self, state: bool = False) -> None:
        """The messages, and the state if asked. A disk that is full must not end a chat."""
        if self.store and (self.session.messages or self.record.saved):
            try:
                self.store.write(self._filled())
                if state:
                    self.store.write_state(self.record.name, self.session)
                    self.store.remove_old_states()
            except LinAttnError as error:
                self.warn(f"not kept: {error}")

    def keep(self) -> None:
        """All of it, before another conversation begins or the chat ends."""
        self.autosave(state=True)

    def keep_as(self, name: str) -> None:
        """Under a name of a person's choice."""
        store = self._needed_store()
        if name != self.record.name:
            self._must_be_free(name)
            if not self.record.named:
                store.remove(self.record.name)
            self.record.name = name
        self.record.named = True
        store.write(self._filled())
        store.write_state(name, self.session)

    def _filled(self) -> Record:
        record, session = self.record, self.session
        record.model, record.messages, record.system = self.model_id, session.messages, session.system
        record.template = dict(session.template)
        record.read_tokens, record.read_seconds = self.measured
        return record

    def _needed_store(self) -> Store:
        if self.store is None:
            raise RequestError("this chat keeps nothing (--no-save): /save FILE.session writes a file of its own")
        return self.store

    def _must_be_free(self, name: str) -> None:
        if self._needed_store().path(name).exists():
            raise SessionFileError(f"there is a session {name!r} already: choose another name, or /load it")

    # Going elsewhere

    def begin_anew(self) -> None:
        self.keep()
        self.session.clear()
        self.record = Record(self.fresh_name())

    def fork(self, name: str = "") -> None:
        """Go on in a copy named ``name``; the old one stays on disk."""
        self._needed_store()
        if not name:
            name = base = f"{self.record.name}-fork"
            n = 2
            while name in self.names():
                name, n = f"{base}-{n}", n + 1
        self._must_be_free(name)
        self.keep()
        self.session = self.session.fork()
        self.record = Record(name, named=True)
        self.autosave()

    def resume(self, name: str) -> str:
        """Go on with a kept conversation; returns what to tell. Raises SessionFileError where there is none."""
        store = self._needed_store()
        store.path(name)
        if name != self.record.name:
            self.keep()
        began = time.perf_counter()
        model, tokenizer = self.session.model, self.session.tokenizer
        self.record, self.session, notice = store.load(name, model, tokenizer, **self.session_options)
        return notice or self._resumed(time.perf_counter() - began)

    def resume_file(self, path: str) -> str:
        """Go on with the conversation of a file that /save wrote; it becomes one of its own."""
        self.keep()
        began, notice = time.perf_counter(), ""
        model, tokenizer = self.session.model, self.session.tokenizer
        limits = {key: value for key, value in self.session_options.items() if key == "memory_limit"}
        try:
            session = la.Session.load(path, model, tokenizer, **limits)
        except SessionFileError as error:
            session = la.Session.load(path, model, tokenizer, state=False, **limits)
            notice = f"{error}".partition(";")[0] + "; the messages are whole and will be read again"
        self.session, self.record = session, Record(self.fresh_name())
        return notice or self._resumed(time.perf_counter() - began)

    def _resumed(self, seconds: float) -> str:
        """How long it took, against reading everything again at the speed that was measured."""
        tokens = self.session.state.offset
        text = (
            f"{self.record.name}: {len(self.session.messages)} messages, {tokens:,} tokens of state in {seconds:.2f} s"
        )
        read, took = self.measured
        if tokens and took > 0:
            text += f" (reading them again would take about {tokens * took / read:.1f} s)"
        return text

    def change_model(self, model_id: str) -> None:
        """Go on with another model. Where it cannot be loaded, the old one is back."""
        self.load(model_id, lazy=True)  # a wrong name is told before anything is given up
        self.keep()
        old = self.session
        system, messages, template = old.system, old.messages, dict(old.template)
        self.session = old = None  # two models may not fit beside each other
        gc.collect()
        try:
            model, tokenizer = self.load(model_id)
            self.model_id, self.totals = model_id, Totals()
        except LinAttnError:
            model, tokenizer = self.load(self.model_id)
            raise
        finally:
            self.session = la.Session(model, tokenizer, system, messages, **self.session_options, **template)
