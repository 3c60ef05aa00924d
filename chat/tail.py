"""The unfinished end of an answer: repainted in place as it grows, replaced by its final form when it is whole."""

from __future__ import annotations

import re
import sys

from rich.console import Console, RenderableType
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

CLEAR_LINE = Control((ControlType.ERASE_IN_LINE, 0))
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def harmless(text: str) -> str:
    """Without control characters: what a model writes must not steer the terminal."""
    return CONTROLS.sub("", text)


class Tail:
    """Lines at the cursor that can still change. Only what differs is written again, in one piece, so nothing flickers.

    What has scrolled off the screen can never be changed; so of a tail that is taller than the screen only the end is shown.
    """

    def __init__(self, console: Console):
        self.console = console
        self._painted: list[Text] = []

    def paint(self, lines: list[Text]) -> None:
        """Show ``lines`` in place of what was painted before."""
        self._write(lines[-max(1, self.console.height - 1) :], final=False)

    def commit(self, lines: list[Text]) -> None:
        """Show the final form; what is painted next goes below it."""
        self._write(lines, final=True)

    def erase(self) -> None:
        self._write([], final=False)

    def lines(self, renderable: RenderableType) -> list[Text]:
        """As it will be shown, without the space that pads lines and what is rendered."""
        found = []
        for segments in self.console.render_lines(renderable, pad=False):
            line = Text.assemble(*((one.text, one.style or "") for one in segments), end="")
            line.rstrip()
            found.append(line)
        full = [i for i, line in enumerate(found) if line.plain]
        return found[full[0] : full[-1] + 1] if full else []

    def _write(self, lines: list[Text], final: bool) -> None:
        old, width = self._painted, self.console.width
        same = 0
        while same < min(len(old), len(lines)) and old[same] == lines[same]:
            same += 1
        if same == len(old) == len(lines) and not final:
            return
        if same and (same == len(old) or (same == len(lines) and not final)):
            same -= 1  # between two pictures the cursor is at the end of the last line, not below it
        # A terminal that became narrower has wrapped what was painted.
        rows = sum(max(1, -(-line.cell_len // width)) for line in old[same:])
        # Clearing line by line flickers less, and terminals do not take it for a cleared screen to keep in their scrollback.
        by_line = rows <= len(lines) - same
        with self.console.capture() as capture:
            for i, line in enumerate(lines[same:], start=same):
                if by_line:
                    self.console.control(CLEAR_LINE)
                self.console.print(line, soft_wrap=True, end="\n" if final or i < len(lines) - 1 else "")
        out = "\r" + (f"\x1b[{rows - 1}A" if rows > 1 else "") + ("" if by_line else "\x1b[J") if old else ""
        self.console.file.write(out + capture.get())
        self.console.file.flush()
        self._painted = [] if final else lines


def quick_console(stderr: bool = False) -> Console:
    """A console that leaves text as it is; rich minds NO_COLOR, dumb terminals and the width."""
    return Console(file=sys.stderr if stderr else sys.stdout, highlight=False, markup=False, emoji=False)
