"""Reading a message from the terminal: prompt_toolkit where it is installed, the standard library's readline otherwise."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

PROMPT, MORE = ">>> ", "... "


def make_reader(commands: list[str]) -> Callable[[], str]:
    """A function that returns the next message; it raises EOFError at Ctrl-D and KeyboardInterrupt at Ctrl-C."""
    ask = _toolkit(commands) or _plain()
    return lambda: join(ask)


def join(ask: Callable[[str], str]) -> str:
    """One message from one or more lines: a trailing backslash, or three quotes, make it go on."""
    line = ask(PROMPT)
    if line.startswith('"""'):
        lines = [line[3:]]
        while not lines[-1].endswith('"""') or (len(lines) == 1 and len(lines[0]) < 3):
            lines.append(ask(MORE))
        lines[-1] = lines[-1].removesuffix('"""')
        return "\n".join(lines).strip("\n")
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(ask(MORE))
    return "\n".join(lines)


def _toolkit(commands: list[str]) -> Callable[[str], str] | None:
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.history import InMemoryHistory
    except ImportError:
        return None
    session: PromptSession = PromptSession(
        history=InMemoryHistory(),
        completer=WordCompleter(commands, sentence=True),
        complete_while_typing=False,
    )
    return session.prompt


def _plain() -> Callable[[str], str]:
    with suppress(ImportError):
        import readline  # noqa: F401 - its import gives input() line editing and history
    return input
