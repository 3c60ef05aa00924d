"""Ctrl-C, SIGTERM and a closed terminal: what they mean depends on what the chat is doing, and none of them tears anything."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


class Leave(Exception):
    """The program was asked to end."""


class Signals:
    """While this is entered, Ctrl-C stops the answer, or raises KeyboardInterrupt at the prompt, and otherwise does nothing.

    SIGTERM and SIGHUP end the chat in order: the answer stops, or the prompt raises Leave, and ``leaving`` is the signal's
    number.
    """

    def __init__(self) -> None:
        self.pressed, self.leaving = False, 0
        self.cancel: Callable[[], None] = lambda: None  # stops the running answer
        self.wake: Callable[[], bool] = lambda: (
            False
        )  # ends a prompt that waits in an event loop; whether there was one
        self._at_prompt = False

    def __enter__(self) -> Signals:
        self._previous = {}
        with suppress(ValueError):  # not in the main thread: signals go elsewhere
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame) -> None:
        if number == signal.SIGINT:
            self.pressed = True
            if self._at_prompt:
                raise KeyboardInterrupt
        else:
            self.leaving = number
            if number == signal.SIGHUP:
                abandon_terminal()
            if not self.wake() and self._at_prompt:
                raise Leave
        self.cancel()

    @contextmanager
    def prompting(self) -> Iterator[None]:
        """While a person is asked."""
        if self.leaving:
            raise Leave
        self._at_prompt = True
        try:
            yield
        finally:
            self._at_prompt = False

    @contextmanager
    def answering(self, cancel: Callable[[], None]) -> Iterator[None]:
        """While an answer runs; nothing of the person's typing is shown in it."""
        self.pressed, self.cancel = False, cancel
        try:
            with _no_echo():
                yield
        finally:
            self.cancel = lambda: None


def abandon_terminal() -> None:
    """The terminal is gone: what is still written goes nowhere, instead of failing."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)


@contextmanager
def _no_echo() -> Iterator[None]:
    """What is typed ahead is neither shown in the middle of the answer nor sent after it: a text that is pasted at the wrong
    moment would become a message with every line."""
    try:
        import termios

        before = termios.tcgetattr(sys.stdin.fileno())
    except Exception:  # no terminal
        yield
        return
    quiet = [*before]
    quiet[3] &= ~termios.ECHO
    with suppress(termios.error):
        termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        with suppress(termios.error, OSError):
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSAFLUSH, before)
