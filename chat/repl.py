"""The loop: read a line, answer it, keep going, and keep what was said."""

from __future__ import annotations

import errno
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import mlx_linattn as la
from mlx_linattn.errors import LinAttnError, RequestError, SessionFileError

from . import file_commands  # noqa: F401 - it and what it imports register the commands
from .commands import shortened
from .documents import in_one
from .footer import Totals, footer
from .registry import completions, find, nearest
from .sessions import Record, Store
from .settings import Settings
from .signals import Leave, Signals, abandon_terminal
from .view import View

READ = "I have read it. What would you like to know?"  # the answer that stands after a document


class Repl:
    """A person's chat. ``load`` gives (model, tokenizer) of an id; ``store`` is None where nothing is to be kept."""

    def __init__(
        self, session: la.Session, model_id: str, view: View, settings: Settings, signals: Signals,
        store: Store | None = None, load: Callable[[str], tuple] = la.load, **session_options: Any,
    ):  # fmt: skip
        self.session, self.model_id, self.view, self.settings, self.signals = session, model_id, view, settings, signals
        self.store, self.load, self.session_options = store, load, session_options
        self.record = Record(self.fresh_name())
        self.totals = Totals()
        self.done = False

    @property
    def model_name(self) -> str:
        return Path(self.model_id).name or self.model_id

    # The loop

    def run(self, reader: Callable[[], str]) -> int:
        try:
            while not self.done and not self.signals.leaving:
                try:
                    self.turn(reader())
                except KeyboardInterrupt:  # at the prompt it clears the line
                    self.view.note("(Ctrl-D or /exit leaves)")
                except EOFError:
                    self.done = True
                    self.view.err.print()
                except LinAttnError as error:
                    self.view.error(str(error))
        except Leave:
            pass
        except OSError as error:
            if error.errno != errno.EIO:  # the terminal has gone
                raise
            abandon_terminal()
        finally:
            self.keep()
        return 128 + self.signals.leaving if self.signals.leaving else 0

    def turn(self, text: str) -> None:
        """A line: a command, or a message to answer."""
        if not text.strip():
            return
        if not text.startswith("/") or text.startswith("//"):
            self.answer(self.session.stream, text.removeprefix("/") if text.startswith("//") else text)
            return
        name, _, rest = text.strip().partition(" ")
        known = find(name.lower())
        if known is None:
            self.view.error(f"Unknown command {name}; nearest: {nearest(name.lower())}. Nothing was sent. Begin with // to send a slash.")  # fmt: skip
            return
        known.handler(self, rest.strip())

    def complete(self, line: str) -> list[str]:
        return completions(line, self.session_names)

    # Answers

    def answer(self, start: Callable[..., Iterator[Any]], *arguments) -> bool:
        """Stream what ``start`` gives; False where it was stopped. What was said until then stays in the conversation."""
        self.view.markdown = self.settings.markdown
        self.stream(start, *arguments, **self.settings.stream_options())
        stopped = self.session.last is not None and self.session.last.finish_reason == "cancel"
        if stopped:
            self.view.note("(stopped) /continue goes on, /retry begins anew")
        if self.settings.stats:
            self.view.note(footer(self.model_name, self.session, self.totals, self.view.err.width))
        self.autosave()
        return not stopped

    def stream(self, start, *arguments, show: bool = True, **options) -> None:
        """Run one turn; its pieces are shown, or only its progress."""
        began, first = time.perf_counter(), None
        with self.signals.answering(self.session.cancel):

            def progress(done: int, total: int) -> None:
                if self.signals.pressed or self.signals.leaving:
                    self.session.cancel()
                self.view.reading(done, total)

            try:
                with closing(start(*arguments, progress=progress, **options)) as pieces:
                    for piece in pieces:
                        first = first or time.perf_counter()
                        if show:
                            self.view.piece(piece.kind, piece.text, piece.response.generation_tokens)
                        if self.signals.pressed or self.signals.leaving:
                            self.session.cancel()
            finally:
                self.view.end() if show else self.view.stop_reading()
        if self.session.last is not None:
            self.totals.count(self.session.last, (first or time.perf_counter()) - began)

    def last_answer(self) -> str:
        text = next(
            (one.get("content") for one in reversed(self.session.messages) if one.get("role") == "assistant"), None
        )
        if not text:
            raise RequestError("there is no answer yet")
        return text

    # Documents

    def read_documents(self, documents: dict[str, str]) -> None:
        """Read them now, as a turn of their own: questions about them can be asked and undone without reading them again."""
        text = in_one(documents)
        began, before = time.perf_counter(), list(self.session.messages)
        self.stream(self.session.stream, text, show=False, **self.settings.stream_options() | {"max_tokens": 1})
        if self.session.last.finish_reason == "cancel":
            self.session.messages = before
            self.view.note("(stopped) Nothing was read into the conversation.")
            return
        # The one token was only there to have everything before it read.
        self.session.messages = [*self.session.messages[:-1], {"role": "assistant", "content": READ}]
        self.autosave()
        seconds, last = time.perf_counter() - began, self.session.last
        names = ", ".join(Path(name).name for name in documents)
        self.view.note(
            f"Read {names}: {last.prefilled_tokens:,} tokens in {seconds:.1f} s. Ask about it; /undo takes it out."
        )

    # Keeping

    def fresh_name(self) -> str:
        return self.store.fresh_name() if self.store else "chat"

    def session_names(self) -> list[str]:
        return self.store.names() if self.store else []

    def _fill(self) -> Record:
        record, session, totals = self.record, self.session, self.totals
        record.model, record.messages, record.system = self.model_id, session.messages, session.system
        record.template = dict(session.template)
        if totals.longest_read > record.read_tokens:
            record.read_tokens, record.read_seconds = totals.longest_read, totals.longest_seconds
        return record

    def autosave(self) -> None:
        """The messages. A disk that is full must not end a chat."""
        if self.store and self.session.messages:
            try:
                self.store.write(self._fill())
            except SessionFileError as error:
                self.view.error(f"not kept: {error}")

    def keep(self) -> None:
        """Messages and state, before another conversation begins or the chat ends."""
        if self.store and self.session.messages:
            try:
                self.store.write(self._fill())
                self.store.write_state(self.record.name, self.session)
                self.store.remove_old_states()
            except LinAttnError as error:
                self.view.error(f"not kept: {error}")

    def keep_as(self, name: str) -> None:
        if self.store is None:
            raise RequestError("this chat keeps nothing (--no-save): /save FILE.session writes a file")
        if name != self.record.name:
            if name in self.store.names():
                raise SessionFileError(f"there is a session {name!r} already: choose another name, or /load it")
            self.store.path(name)
            if not self.record.named:
                self.store.remove(self.record.name)
            self.record.name = name
        self.record.named = True
        self.store.write(self._fill())
        self.store.write_state(name, self.session)

    def begin_anew(self) -> None:
        self.keep()
        self.session.clear()
        self.record = Record(self.fresh_name())

    def fork(self, name: str = "") -> None:
        self.keep()
        names = self.session_names()
        base = name or f"{self.record.name}-fork"
        if name in names:
            raise SessionFileError(f"there is a session {name!r} already: choose another name, or /load it")
        n = 2
        name = base
        while name in names:
            name, n = f"{base}-{n}", n + 1
        if self.store is None:
            raise RequestError(
                "this chat keeps nothing (--no-save), so the other branch would be lost: /save FILE.session"
            )
        self.store.path(name)
        self.session = self.session.fork()
        self.record = Record(name, named=True)
        self.autosave()

    def resume(self, name: str) -> None:
        """Go on with a kept conversation. Raises SessionFileError where there is none."""
        if self.store is None:
            raise RequestError("this chat keeps nothing (--no-save), and has no sessions to load")
        if name != self.record.name:
            self.keep()
        began = time.perf_counter()
        model, tokenizer = self.session.model, self.session.tokenizer
        record, session, notice = self.store.load(name, model, tokenizer, **self.session_options)
        self.adopt(session, record, time.perf_counter() - began, notice)

    def adopt(self, session: la.Session, record: Record, seconds: float, notice: str = "") -> None:
        self.session, self.record = session, record
        n = session.state.offset
        text = f"{record.name}: {len(session.messages)} messages, {n:,} tokens of state in {seconds:.2f} s"
        if n and record.read_seconds > 0:
            again = n * record.read_seconds / record.read_tokens
            text += f" (reading them again would take about {again:.1f} s)"
        self.view.note(notice or text)
        if session.messages:
            self.view.note("Last: " + shortened(session.messages[-1].get("content"), 200))

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
            self.model_id = model_id
        except LinAttnError:
            model, tokenizer = self.load(self.model_id)
            raise
        finally:
            self.session = la.Session(model, tokenizer, system, messages, **self.session_options, **template)
