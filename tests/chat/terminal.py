"""A pseudo-terminal to use a program as a person does: type, wait for what appears, press keys."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from fcntl import ioctl

ESCAPES = re.compile(r"\x1b(\[[0-9;?>=]*[ -/]*[@-~]|\][^\x07]*\x07|[=>()][A-Z0-9]?)")


def _at_a_terminal() -> None:
    ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which is ignored in what a script starts in the background


class Terminal:
    def __init__(self, *arguments: str, columns: int = 100, cwd=None, **environment: str):
        self.master, slave = pty.openpty()
        ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        # Not the size that whoever runs the tests says of another terminal.
        inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlx_linattn", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=cwd,
            env={**inherited, "TERM": "xterm", "HF_HUB_OFFLINE": "1", "PROMPT_TOOLKIT_NO_CPR": "1", **environment},
            start_new_session=True,
            preexec_fn=_at_a_terminal,
        )
        os.close(slave)
        self.raw = ""  # all that the program wrote
        self.screen = ""  # all that appeared, without escape sequences
        self._seen = 0

    def expect(self, text: str, timeout: float = 30) -> str:
        """Wait until ``text`` appears after what was expected before; returns what came in between."""
        end = time.monotonic() + timeout
        while (found := self.screen.find(text, self._seen)) < 0:
            if not self._read(end - time.monotonic()):
                raise AssertionError(f"{text!r} did not appear; the screen ends with:\n{self.screen[-1500:]}")
        between, self._seen = self.screen[self._seen : found], found + len(text)
        return between

    def appears(self, text: str, timeout: float) -> bool:
        try:
            self.expect(text, timeout)
        except AssertionError:
            return False
        return True

    def _read(self, timeout: float) -> bool:
        if timeout <= 0 or not select.select([self.master], [], [], timeout)[0]:
            return False
        try:
            data = os.read(self.master, 65536)
        except OSError:  # the program has closed the terminal
            return False
        self.raw += data.decode(errors="replace")
        self.screen += ESCAPES.sub("", data.decode(errors="replace")).replace("\r", "")
        return bool(data)

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def enter(self, text: str) -> None:
        self.type(text + "\r")

    def paste(self, text: str) -> None:
        """As terminals send what is pasted, between two brackets."""
        data = f"\x1b[200~{text}\x1b[201~".encode()
        while data:  # the program reads while we write, or both would wait
            data = data[os.write(self.master, data[:1024]) :]
            self._read(0.01)

    def resize(self, columns: int) -> None:
        ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))

    def hang_up(self) -> None:
        """Close the terminal's window."""
        os.close(self.master)
        self.master = -1

    def interrupt(self) -> None:
        self.type("\x03")

    def end_of_input(self) -> None:
        self.type("\x04")

    def wait(self, timeout: float = 30) -> int:
        while self._read(0.2):
            pass
        return self.process.wait(timeout)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.master >= 0:
            os.close(self.master)
