"""What the chat shows: answers on stdout, everything else on stderr. In a pipe stdout carries nothing but the answer."""

from __future__ import annotations

import sys
import time

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from .markdown import MarkdownStream, RawStream
from .tail import Tail, harmless, quick_console

PROGRESS_FROM = 1024  # prompts with fewer new tokens are read before a bar could be drawn
THOUGHT_LINES = 3  # of a running thought that are shown while it is folded


class View:
    def __init__(self, quiet: bool = False) -> None:
        self.out, self.err = quick_console(), quick_console(stderr=True)
        self.quiet = quiet  # no notes, only errors
        self.terminal = sys.stdout.isatty()
        self.live = self.terminal and not self.out.is_dumb_terminal  # the cursor can go up
        self._bar: Progress | None = None
        self._answer: MarkdownStream | RawStream | None = None
        self._thought: _Thought | None = None
        self.markdown, self.fold = True, True

    def note(self, text: str) -> None:
        if not self.quiet:
            self.err.print(harmless(text), style="dim")

    def say(self, renderable) -> None:
        """What a command was asked to show."""
        self.err.print(harmless(renderable) if isinstance(renderable, str) else renderable)

    def error(self, text: str) -> None:
        self.err.print(harmless(" ".join(text.split())), style="red")

    def reading(self, done: int, total: int) -> None:
        """A progress bar for a long prompt."""
        if total < PROGRESS_FROM or not sys.stderr.isatty() or self.err.is_dumb_terminal:
            return
        if self._bar is None and done < total:
            wide = self.err.width >= 60
            columns = [TextColumn("reading"), BarColumn(bar_width=30 if wide else 8)]
            columns.append(TextColumn("{task.completed:,.0f} of {task.total:,.0f}" + (" tokens" if wide else "")))
            self._bar = Progress(*columns, TimeRemainingColumn(compact=True), console=self.err, transient=True)
            self._bar.start()
            self._bar.add_task("reading", total=total)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done)
            if done >= total:
                self.stop_reading()

    def stop_reading(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def piece(self, kind: str, text: str, count: int) -> None:
        """A piece of the answer, which has ``count`` tokens so far; thoughts go to stderr."""
        if not text:
            return
        self.stop_reading()
        if kind == "reasoning":
            if self._thought is None:
                self._thought = _Thought(self, count)
            self._thought.feed(text, count)
            return
        self._end_thought()
        if self._answer is None:
            rendered = self.markdown and self.live
            self._answer = MarkdownStream(self.out) if rendered else RawStream(self.out, exact=not self.terminal)
        self._answer.feed(text)

    def end(self) -> None:
        """The answer is over, or what there is of it."""
        self.stop_reading()
        self._end_thought()
        if self._answer is not None:
            self._answer.end()
        elif not self.terminal:
            self.out.file.write("\n")  # an empty answer is a line as well
            self.out.file.flush()
        self._answer = None

    def _end_thought(self) -> None:
        if self._thought is not None:
            self._thought.end()
            self._thought = None


class _Thought:
    """A model's thought, dimmed: all of it, or its last lines while it runs and one line when it is over."""

    def __init__(self, view: View, count: int):
        self.view, self.tail = view, Tail(view.err)
        self.first, self.count = count, count
        self.began = self.painted = time.perf_counter()
        self.text = ""
        self.moving = view.fold and view.live and sys.stderr.isatty()

    def feed(self, text: str, count: int) -> None:
        self.text += harmless(text)
        self.count = count
        if not self.view.fold:
            self.view.err.print(harmless(text), style="dim italic", end="", soft_wrap=True)
            return
        now = time.perf_counter()
        if self.moving and (now - self.painted > 0.05 or self.count == self.first):
            self.painted = now
            last = self.tail.lines(Text(self.text[-1000:].strip(), style="dim italic"))[-THOUGHT_LINES:]
            head = f"thinking for {now - self.began:.0f} s ({self.tokens})"
            self.tail.paint([Text(head, style="dim"), *last])

    @property
    def tokens(self) -> str:
        n = self.count - self.first + 1
        return f"{n:,} token" + ("s" if n != 1 else "")

    def end(self) -> None:
        self.tail.erase()
        if not self.view.fold and not self.text.endswith("\n"):
            self.view.err.print()
        self.view.note(f"thought for {time.perf_counter() - self.began:.1f} s ({self.tokens})")


def table(rows) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(style="dim")
    for left, right in rows:
        grid.add_row(Text(left), Text(right))
    return grid


def shortened(text, most: int = 60) -> str:
    words = " ".join(str(text or "").split())
    return words if len(words) <= most else words[: most - 1] + "…"
