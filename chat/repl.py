"""The loop: read a line, answer it, keep going. Ctrl-C stops an answer and keeps the chat."""

from __future__ import annotations

import difflib
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import mlx_linattn as la
from mlx_linattn.errors import LinAttnError

from .lines import make_reader
from .view import View

COMMANDS = {
    "/help": "this list",
    "/clear": "forget the conversation",
    "/system": "show or set the system prompt: /system You are terse.",
    "/exit": "leave (also Ctrl-D)",
}


class Repl:
    def __init__(self, session: la.Session, model: str, view: View, options: dict):
        self.session, self.view, self.options = session, view, options
        self.name = Path(model).name or model

    def once(self, question: str) -> int:
        """One question from a script. The answer alone goes to stdout."""
        finished = self.answer(question)
        self.view.footer(self.name, self.session)
        return 0 if finished else 130

    def run(self) -> int:
        reader = make_reader(list(COMMANDS))
        self.view.note(f"Talking to {self.name}. /help lists commands; Ctrl-C stops an answer, Ctrl-D leaves.")
        while True:
            try:
                text = reader()
            except KeyboardInterrupt:  # at the prompt it clears the line
                self.view.note("(Ctrl-D or /exit leaves)")
                continue
            except EOFError:
                print()
                return 0
            if not text.strip():
                continue
            if text.startswith("/") and not text.startswith("//"):
                if self.command(text.strip()) == "exit":
                    return 0
                continue
            try:
                self.answer(text.removeprefix("/") if text.startswith("//") else text)
                self.view.footer(self.name, self.session)
            except LinAttnError as error:
                self.view.error(str(error))

    def command(self, text: str) -> str | None:
        name, _, rest = text.partition(" ")
        if name in ("/exit", "/quit", "/bye"):
            return "exit"
        if name == "/help":
            for command, what in COMMANDS.items():
                self.view.note(f"{command:<9} {what}")
            self.view.note('A line that ends in \\ goes on; """ opens and closes a block; // sends a literal slash.')
        elif name == "/clear":
            self.session.clear()
            self.view.note("The conversation is forgotten.")
        elif name == "/system":
            if rest.strip():
                self.session.system = rest.strip()
            self.view.note(f"System prompt: {self.session.system or '(none)'}")
        else:
            nearest = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0)[0]
            self.view.error(
                f"Unknown command {name}; nearest: {nearest}. Nothing was sent. Begin with // to send a slash."
            )
        return None

    def answer(self, text: str) -> bool:
        """Stream the answer; False where Ctrl-C stopped it. What was said until then stays in the conversation."""
        with _interruptible() as pressed:

            def progress(done: int, total: int) -> None:
                if pressed():
                    raise KeyboardInterrupt
                self.view.reading(done, total)

            try:
                with closing(self.session.stream(text, progress=progress, **self.options)) as pieces:
                    for piece in pieces:
                        self.view.piece(piece.kind, piece.text)
                        if pressed():
                            break
            except KeyboardInterrupt:
                pass
            finally:
                self.view.end()
            if pressed():
                self.view.note("(stopped)")
            return not pressed()


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C sets a flag that is looked at between tokens, so that no computation is torn; the second one raises."""
    count = 0

    def handler(*_):
        nonlocal count
        count += 1
        if count > 1:
            raise KeyboardInterrupt

    try:
        previous = signal.signal(signal.SIGINT, handler)
    except ValueError:  # not in the main thread: Ctrl-C goes elsewhere
        yield lambda: False
        return
    try:
        yield lambda: count > 0
    finally:
        signal.signal(signal.SIGINT, previous)
        sys.stdout.flush()
