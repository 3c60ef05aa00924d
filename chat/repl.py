"""The loop: read a line, answer it, keep going, and keep what was said."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import mlx_linattn as la
from mlx_linattn.errors import LinAttnError, MemoryLimitError, RequestError

from .conversation import Conversation
from .documents import in_one
from .footer import footer
from .registry import completions, find, nearest
from .settings import Settings
from .signals import Leave, Signals, abandon_terminal
from .view import View, shortened

READ = "I have read it. What would you like to know?"  # the answer that stands after a document
SHORTEST_STEP, LONGEST_STEP = 64, 2048


def step_of_a_second(tokens: int, seconds: float) -> int | None:
    """How many prompt tokens to read at a time, at the measured speed: few enough that Ctrl-C is heard within a second
    or so and that progress is seen. None: as many as memory allows."""
    if tokens < 256:  # too few to tell the speed
        return 256
    step = SHORTEST_STEP
    while step < LONGEST_STEP and step * 2 * seconds <= tokens:
        step *= 2
    return None if step == LONGEST_STEP else step


class Repl:
    """A person's chat: a conversation, what shows it, how it answers, and what interrupts it."""

    def __init__(self, conversation: Conversation, view: View, settings: Settings, signals: Signals):
        self.conversation, self.view, self.settings, self.signals = conversation, view, settings, signals
        self.done = False

    @property
    def session(self) -> la.Session:
        return self.conversation.session

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
            self.conversation.keep()
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
        return completions(line, self.conversation.names)

    # Answers

    def answer(self, start: Callable[..., Iterator[Any]], *arguments) -> bool:
        """Stream what ``start`` gives; False where it was stopped. What was said until then stays in the conversation."""
        self.view.markdown = self.settings.markdown
        self.stream(start, *arguments)
        stopped = self.session.last is not None and self.session.last.finish_reason == "cancel"
        if stopped:
            self.view.note("(stopped) /continue goes on, /retry begins anew")
        if self.settings.stats:
            self.view.note(
                footer(self.conversation.model_name, self.session, self.conversation.totals, self.view.err.width)
            )
        self.conversation.autosave()
        return not stopped

    def stream(self, start: Callable[..., Iterator[Any]], *arguments, show: bool = True, **options) -> None:
        """Run one turn; its pieces are shown, or only its progress."""
        options = {**self.settings.stream_options(), **options}
        step = self.settings.prefill_step_size or step_of_a_second(*self.conversation.measured)
        try:
            self._run(start, arguments, show, {**options, "prefill_step_size": step})
        except MemoryLimitError:
            if self.settings.prefill_step_size or step in (None, SHORTEST_STEP):
                raise
            self._run(start, arguments, show, {**options, "prefill_step_size": SHORTEST_STEP})

    def _run(self, start, arguments, show: bool, options: dict[str, Any]) -> None:
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
            self.conversation.totals.count(self.session.last, (first or time.perf_counter()) - began)

    def last_answer(self) -> str:
        text = next(
            (one.get("content") for one in reversed(self.session.messages) if one.get("role") == "assistant"), None
        )
        if not text:
            raise RequestError("there is no answer yet")
        return text

    def resumed(self, told: str) -> None:
        """Another conversation was opened: say how that went, and where it stands."""
        self.view.note(told)
        if self.session.messages:
            self.view.note(f"Last: {shortened(self.session.messages[-1].get('content'), 200)}")

    # Documents

    def read_documents(self, documents: dict[str, str]) -> None:
        """Read them now, as a turn of their own: questions about them can be asked and undone without reading them again."""
        text = in_one(documents)
        began, before = time.perf_counter(), list(self.session.messages)
        self.stream(self.session.stream, text, show=False, max_tokens=1)
        if self.session.last.finish_reason == "cancel":
            self.session.messages = before
            self.view.note("(stopped) Nothing was read into the conversation.")
            return
        # The one token was only there to have everything before it read.
        self.session.messages = [*self.session.messages[:-1], {"role": "assistant", "content": READ}]
        self.conversation.autosave()
        seconds, last = time.perf_counter() - began, self.session.last
        names = ", ".join(Path(name).name for name in documents)
        self.view.note(
            f"Read {names}: {last.prefilled_tokens:,} tokens in {seconds:.1f} s. Ask about it; /undo takes it out."
        )
