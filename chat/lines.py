"""Reading a message from the terminal: prompt_toolkit where it is installed, the standard library's readline otherwise."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from .signals import Signals

PROMPT, MORE = ">>> ", "... "
REMEMBERED = 1000  # lines of history
Complete = Callable[[str], list[str]]  # what could stand in place of a line's last word


def make_reader(complete: Complete, history: History, signals: Signals) -> Callable[[], str]:
    """A function that returns the next message; it raises EOFError at Ctrl-D and KeyboardInterrupt at Ctrl-C."""
    ask = None if os.environ.get("TERM", "dumb") == "dumb" else _toolkit(complete, history, signals)
    return ask or _plain(complete, history, signals)


def incomplete(text: str) -> bool:
    """Whether a message goes on in the next line: three quotes are open, or it ends with a backslash."""
    if text.startswith('"""'):
        return not (len(text) >= 6 and text.rstrip().endswith('"""'))
    return text.endswith("\\")


def joined(text: str) -> str:
    """The message without quotes and backslashes that only held its lines together."""
    if text.startswith('"""') and not incomplete(text):
        return text.rstrip()[3:-3].strip("\n")
    return text.replace("\\\n", "\n")


class History:
    """What was typed, a JSON string a line, in a file for its owner alone."""

    def __init__(self, file: Path):
        self.file = file

    def read(self) -> list[str]:
        """Oldest first."""
        found = []
        with suppress(OSError):
            for line in self.file.read_text("utf-8", errors="replace").splitlines()[-REMEMBERED:]:
                with suppress(ValueError):
                    found.append(str(json.loads(line)))
        return found

    def add(self, text: str) -> None:
        with suppress(OSError):  # a chat without history is still a chat
            self.file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with open(handle, "a", encoding="utf-8") as file:
                file.write(json.dumps(text) + "\n")


def last_word(line: str) -> str:
    return line.rpartition(" ")[2]


def _toolkit(complete: Complete, history: History, signals: Signals) -> Callable[[], str] | None:
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import Completer, Completion
        from prompt_toolkit.history import InMemoryHistory
        from prompt_toolkit.key_binding import KeyBindings
    except ImportError:
        return None

    class Words(Completer):
        def get_completions(self, document, _event):
            line = document.text_before_cursor
            for word in complete(line):
                yield Completion(word, start_position=-len(last_word(line)))

    class Remembered(InMemoryHistory):
        def store_string(self, string: str) -> None:
            super().store_string(string)
            history.add(string)

    keys = KeyBindings()

    @keys.add("enter")
    def _(event) -> None:
        buffer = event.current_buffer
        if incomplete(buffer.document.text_before_cursor) or incomplete(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession = PromptSession(
        history=Remembered(history.read()),
        completer=Words(),
        complete_while_typing=False,
        key_bindings=keys,
        multiline=True,
        prompt_continuation=MORE,
        enable_history_search=True,
    )

    def wake() -> bool:
        app = session.app
        if not app.is_running or app.loop is None:
            return False
        app.loop.call_soon_threadsafe(lambda: app.is_running and app.exit(exception=EOFError()))
        return True

    signals.wake = wake

    def ask() -> str:
        with signals.prompting():
            return joined(session.prompt(PROMPT))

    return ask


def _plain(complete: Complete, history: History, signals: Signals) -> Callable[[], str]:
    with suppress(ImportError):
        import readline

        for text in history.read():
            if "\n" not in text:
                readline.add_history(text)
        readline.set_completer_delims(" ")
        readline.set_completer(lambda _, n: [*complete(readline.get_line_buffer()), None][n])
        apple = "libedit" in (readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if apple else "tab: complete")

    def ask() -> str:
        with signals.prompting():
            text = _input(PROMPT)
            while incomplete(text):
                text += "\n" + _input(MORE)
        if text.strip():
            history.add(text)
        return joined(text)

    return ask


def _input(prompt: str) -> str:
    sys.stdout.flush()
    return input(prompt)
