"""Counts, speeds and memory, in a line, in a table and as a chart."""

from __future__ import annotations

from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

import mlx_linattn as la

BAR = 30  # cells of the longest bar of the chart, where there is room


@dataclass
class Totals:
    """What this chat did so far, and the longest prompt that it read in one go."""

    turns: int = 0
    read: int = 0
    reused: int = 0
    written: int = 0
    read_seconds: float = 0.0
    longest_read: int = 0
    longest_seconds: float = 0.0

    def count(self, last: la.GenerationResponse, seconds: float) -> None:
        self.turns += 1
        self.read += last.prefilled_tokens
        self.reused += last.reused_tokens
        self.written += last.generation_tokens
        self.read_seconds = seconds
        if last.prefilled_tokens > self.longest_read:
            self.longest_read, self.longest_seconds = last.prefilled_tokens, seconds


def size(nbytes: float) -> str:
    for unit, one in (("GB", 1e9), ("MB", 1e6)):
        if nbytes >= one:
            return f"{nbytes / one:,.1f} {unit}"
    return f"{nbytes / 1e3:,.1f} kB"


def footer(model: str, session: la.Session, totals: Totals, width: int) -> str:
    """The line under an answer; in a narrow terminal, lines that break between its parts."""
    last, state = session.last, session.state
    if last is None:
        return ""
    speed = f" at {last.prefilled_tokens / totals.read_seconds:,.0f}/s" if totals.read_seconds > 0 else ""
    parts = [
        model,
        f"ctx {state.offset:,}/{limit(session)}",
        f"{last.generation_tps:,.1f} tok/s",
        f"prompt {last.prompt_tokens:,} ({last.reused_tokens:,} reused, {last.prefilled_tokens:,} read{speed})",
        f"{last.peak_memory:.2f} GB peak",
        f"state {size(state.recurrent_nbytes)} (constant) + KV {size(state.kv_nbytes)} ({growth(session)})",
    ]
    lines = [parts[0]]
    for part in parts[1:]:
        if cell_len(lines[-1]) + 3 + cell_len(part) <= width:
            lines[-1] += f" · {part}"
        else:
            lines.append(part)
    return "\n".join(lines)


def limit(session: la.Session) -> str:
    return f"{session.model.spec.max_positions:,}"


def growth(session: la.Session) -> str:
    options = session.state.options
    bounded = f"bounded to {options.max_kv_size:,}" if options.max_kv_size else "growing"
    return bounded + (f", {options.kv_bits}-bit" if options.kv_bits else "")


def statistics(model: str, session: la.Session, totals: Totals) -> list[tuple[str, str]]:
    """Rows of the table that /stats shows."""
    last, state = session.last, session.state
    rows = [("model", model), ("context", f"{state.offset:,} of {limit(session)} tokens")]
    if last is not None:
        rows += [
            ("last prompt", f"{last.prompt_tokens:,} tokens: {last.reused_tokens:,} reused, {last.prefilled_tokens:,} read"),
            ("last answer", f"{last.generation_tokens:,} tokens, {last.generation_tps:,.1f} a second, ended by {last.finish_reason}"),
            ("peak memory", f"{last.peak_memory:.2f} GB"),
        ]  # fmt: skip
    rows.append(
        (
            "this chat",
            f"{totals.turns} turns, {totals.read:,} read, {totals.reused:,} reused, {totals.written:,} written",
        )
    )
    if totals.longest_seconds > 0:
        speed = totals.longest_read / totals.longest_seconds
        rows.append(("reading", f"{speed:,.0f} tokens a second (over {totals.longest_read:,})"))
    rows.append(
        ("state", f"{size(state.recurrent_nbytes)} (constant) + KV {size(state.kv_nbytes)} ({growth(session)})")
    )
    rows.append(("checkpoints", f"{len(session.checkpoints)} moments to go back to, {size(session.checkpoint_nbytes)}"))
    return rows


def memory_chart(session: la.Session, width: int) -> Text:
    """Bytes of state and of keys and values against the context's length, read off this very state."""
    state = session.state
    if not state.counts:  # its shapes are known once a token was read; this one is never evaluated
        import mlx.core as mx

        state = state.fork()
        session.model(mx.array([[0]]), state)
    most = max(session.model.spec.max_positions, 4096)
    lengths = [1024]
    while lengths[-1] * 4 < most and len(lengths) < 8:
        lengths.append(lengths[-1] * 4)
    here = session.state.offset
    lengths = sorted({*lengths, most, *([here] if here else [])})
    constant = state.recurrent_nbytes
    rows = [(n, max(0, state.nbytes_with(n) - constant)) for n in lengths]
    room = max(4, min(BAR, width - 34))
    largest = max(constant + kv for _, kv in rows)
    chart = Text()
    chart.append(f"{'tokens':>9}  {'state':>9} {'KV':>9}\n", style="dim")
    for n, kv in rows:
        first = max(1, round(room * constant / largest)) if constant else 0
        second = max(1 if kv else 0, round(room * (constant + kv) / largest) - first)
        chart.append(f"{n:>9,}  {size(constant):>9} {size(kv):>9} ", style="bold" if n == here else "")
        chart.append("█" * first, style="green").append("▒" * max(0, second), style="yellow")
        chart.append(" now\n" if n == here else "\n", style="bold")
    chart.append("█", style="green").append(" recurrent state, constant  ")
    chart.append("▒", style="yellow").append(f" keys and values, {growth(session)}")
    return chart
