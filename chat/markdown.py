"""Markdown as it streams: each block is shown once it is whole, code line by line, and only the unfinished end changes."""

from __future__ import annotations

import re
import time

from markdown_it import MarkdownIt
from rich.console import Console
from rich.markdown import Heading, Markdown
from rich.syntax import Syntax
from rich.text import Text

from .tail import Tail, harmless

FENCE = re.compile(r"^\s*(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$")
ITEM = re.compile(r"^\s*([-*+]|\d{1,9}[.)])\s")
HEADING = re.compile(r"^ {0,3}#{1,6}(\s|$)")
PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
INTERVAL = 1 / 30  # seconds between two pictures of the unfinished end


class _Heading(Heading):
    def __rich_console__(self, console, options):
        yield Text("#" * int(self.tag[1:]) + " ", style="dim", end="") + self.text


class _Markdown(Markdown):
    """As rich shows it, but a line stays a line (models write verses and addresses so), and <tags> are text."""

    elements = {**Markdown.elements, "heading_open": _Heading}  # noqa: RUF012 - as rich has it

    def __init__(self, text: str):
        super().__init__(text)
        self.parsed = PARSER.parse(text)
        for token in self.parsed:
            for child in token.children or ():
                if child.type == "softbreak":
                    child.type = "hardbreak"


class MarkdownStream:
    """Feed it text in any pieces; ``end()`` shows the rest. Nothing that was committed is ever touched again."""

    def __init__(self, console: Console, interval: float = INTERVAL):
        self.console, self.tail = console, Tail(console)
        self._line = ""  # the line that is not whole yet
        self._block: list[str] = []  # lines of the block that is not whole yet
        self._gap = False  # a blank line was seen after a list: what follows may still belong to its last item
        self._fence: tuple[str, Syntax] | None = None  # what opened it, and what colours its lines
        self._shown = False  # whether anything was committed
        self._interval, self._painted = interval, 0.0

    def feed(self, text: str) -> None:
        self._line += harmless(text)
        *whole, self._line = self._line.split("\n")
        for line in whole:
            self._take(line)
        now = time.monotonic()
        if whole or now - self._painted >= self._interval:
            self._painted = now
            self._paint()

    def end(self) -> None:
        """The text is over, wherever it stands."""
        line, self._line = self._line, ""
        if line:
            self._take(line)
        self._commit()
        self.tail.erase()

    def _take(self, line: str) -> None:
        fence = FENCE.match(line)
        if self._fence is not None:
            opened, syntax = self._fence
            if fence and fence[1].startswith(opened) and not fence[2]:
                self._fence = None
            else:
                self._code(line, syntax)
            return
        if fence:
            self._commit()
            self._fence = fence[1], Syntax("", fence[2] or "text", theme="ansi_dark", background_color="default")
            if self._shown:
                self.tail.commit([Text("")])
            self._shown = True
        elif not line.strip():
            if self._block and ITEM.match(self._block[0]):
                self._gap = True
            else:
                self._commit()
        elif HEADING.match(line):
            self._commit()
            self._block = [line]
            self._commit()
        else:
            if self._gap:
                if line.startswith(("  ", "\t")):
                    self._block.append("")
                else:
                    self._commit()
            self._gap = False
            self._block.append(line)

    def _code(self, line: str, syntax: Syntax) -> None:
        """A line of code, not wrapped: it can be selected and copied as it is."""
        self.tail.erase()
        text = syntax.highlight(line)
        text.rstrip()
        self.console.print(text, soft_wrap=True)

    def _commit(self) -> None:
        if self._block:
            self.tail.commit(self._spaced("\n".join(self._block)))
            self._shown = True
        self._block, self._gap = [], False

    def _spaced(self, text: str) -> list[Text]:
        """The lines of ``text``, below an empty one if something stands above."""
        lines = self.tail.lines(_Markdown(text))
        return [Text(""), *lines] if self._shown and lines else lines

    def _paint(self) -> None:
        if self._fence is not None:
            self.tail.paint(self.tail.lines(Text(self._line)))
        else:
            last = [] if FENCE.match(self._line) else [self._line]
            self.tail.paint(self._spaced("\n".join([*self._block, *([""] if self._gap else []), *last]).rstrip()))


class RawStream:
    """Text as it comes. On a terminal without control characters; in a pipe exactly as it is."""

    def __init__(self, console: Console, exact: bool):
        self.console, self._exact = console, exact

    def feed(self, text: str) -> None:
        self.console.file.write(text if self._exact else harmless(text))
        self.console.file.flush()

    def end(self) -> None:
        self.console.file.write("\n")
        self.console.file.flush()
