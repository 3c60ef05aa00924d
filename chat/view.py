"""What the chat shows: answers on stdout, everything else dimmed on stderr."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

PROGRESS_FROM = 4096  # prompts with fewer new tokens are read before a bar could be drawn


class View:
    """One console for what is not the answer; rich minds NO_COLOR, dumb terminals and narrow ones."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)
        self._bar: Progress | None = None
        self._thought_since: float | None = None

    def note(self, text: str) -> None:
        self.console.print(text, style="dim", markup=False)

    def error(self, text: str) -> None:
        self.console.print(text, style="red", markup=False)

    def reading(self, done: int, total: int) -> None:
        """A progress bar for a long prompt."""
        if total < PROGRESS_FROM or not self.console.is_terminal:
            return
        if self._bar is None and done < total:
            columns = (
                TextColumn("reading"),
                BarColumn(),
                TextColumn("{task.completed:,.0f} of {task.total:,.0f} tokens"),
            )
            self._bar = Progress(*columns, TimeRemainingColumn(), console=self.console, transient=True)
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

    def piece(self, kind: str, text: str) -> None:
        """A piece of the answer; reasoning goes dimmed to stderr, so that stdout holds the answer alone."""
        if kind == "reasoning":
            if self._thought_since is None:
                self._thought_since = time.perf_counter()
            self.console.print(text, style="dim italic", end="", markup=False, soft_wrap=True)
            return
        self._end_thought()
        sys.stdout.write(text)
        sys.stdout.flush()

    def end(self) -> None:
        """The answer is over."""
        self._end_thought()
        self.stop_reading()
        sys.stdout.write("\n")
        sys.stdout.flush()

    def _end_thought(self) -> None:
        if self._thought_since is not None:
            seconds = time.perf_counter() - self._thought_since
            self._thought_since = None
            self.console.print(f"\n(thought for {seconds:.1f} s)", style="dim", markup=False)

    def footer(self, name: str, session) -> None:
        """Counts, speeds and memory of the newest answer."""
        last, state = session.last, session.state
        if last is None:
            return
        read = last.prompt_tokens - last.reused_tokens
        parts = [
            name,
            f"context {state.offset:,} tokens",
            f"{last.generation_tps:,.1f} tok/s",
            f"prompt {last.prompt_tokens:,} ({last.reused_tokens:,} reused, {read:,} read)",
            f"{last.peak_memory:.2f} GB peak",
            f"state {state.recurrent_nbytes / 1e6:,.1f} MB (constant) + KV {state.kv_nbytes / 1e6:,.1f} MB",
        ]
        self.note(" · ".join(parts))
