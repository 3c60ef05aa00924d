"""A terminal's screen, as far as the chat uses one: text, wide characters, line breaks, cursor up, clear the line or all below."""

from __future__ import annotations

import re

from rich.cells import get_character_cell_size

TOKEN = re.compile(r"\x1b\[([0-9;]*)([A-Za-z])|([\s\S])")


class Screen:
    def __init__(self, columns: int, rows: int = 1000):
        self.columns, self.rows = columns, rows
        self.lines: list[list[str]] = [[]]
        self.top = 0  # the first line that has not scrolled away
        self.row = self.column = 0

    def write(self, text: str) -> None:
        for number, letter, character in TOKEN.findall(text):
            if letter == "A":
                self.row = max(self.top, self.row - int(number or 1))
            elif letter == "J":
                del self.lines[self.row + 1 :]
                del self.lines[self.row][self.column :]
            elif letter == "K":
                del self.lines[self.row][self.column :]
            elif letter:
                assert letter == "m", f"unexpected escape sequence {letter}"
            elif character == "\r":
                self.column = 0
            elif character == "\n":
                self._down()
            else:
                self._put(character)

    def _down(self) -> None:
        self.row, self.column = self.row + 1, 0
        while len(self.lines) <= self.row:
            self.lines.append([])
        self.top = max(self.top, self.row - self.rows + 1)

    def _put(self, character: str) -> None:
        width = get_character_cell_size(character)
        if self.column + width > self.columns:
            self._down()
        line = self.lines[self.row]
        line += [" "] * (self.column - len(line))
        if width == 0:
            if line and self.column:
                line[self.column - 1] += character
            return
        line[self.column : self.column + width] = [character, *[""] * (width - 1)]
        self.column += width

    def flush(self) -> None:
        pass

    @property
    def text(self) -> str:
        return "\n".join("".join(line).rstrip() for line in self.lines).rstrip("\n")
