"""Rows as a table for the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from .machine import sentence
from .modes import short
from .peer import NAME
from .predict import TIMES
from .rows import FILLED, PREDICTED, Report, Row
from .sides import Ours

ABOVE = ", which on a CPU is one thread's and can be beaten"
WIDTH = 150  # where the output is no terminal


def console() -> Console:
    return Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else WIDTH)


def size(nbytes: float) -> str:
    for unit, one in (("GB", 1e9), ("MB", 1e6)):
        if nbytes >= one:
            return f"{nbytes / one:,.2f} {unit}"
    return f"{nbytes / 1e3:,.1f} kB"


def show(report: Report) -> None:
    """Table, machine, and what the marks mean, on stdout."""
    out = console()
    out.print(f"{report.title}; {sentence(report.machine)}", markup=False)
    out.print(_table(report, any(row.library == NAME for row in report.rows)))
    kinds = {row.kind for row in report.rows}
    if PREDICTED in kinds:
        out.print(f"~ predicted, not run; {TIMES}", markup=False)
    if FILLED in kinds:
        out.print(
            "* the context was not read: zeros stand in its place, and only its size counts for these columns",
            markup=False,
        )
    if report.copy_bandwidth:
        share = f"{report.copy_bandwidth / 1e9:,.0f} GB/s, the copy bandwidth measured here"
        out.print(
            f"of bandwidth: weights, state and context of one token over its time, of {share}{ABOVE if report.machine['device'] == 'cpu' else ''}",
            markup=False,
        )
    if any(row.library == NAME for row in report.rows):
        out.print(f"x {NAME}: times faster, and times less memory beside the weights at the peak", markup=False)
    if report.parity:
        worst = ", ".join(f"{name} {value:.1e}" for name, value in report.parity.items())
        out.print(f"largest relative difference on the same tokens: {worst}", markup=False)


def _table(report: Report, versus: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("mode", "context"):
        table.add_column(name, no_wrap=True)
    titles = ["prefill tok/s", "ms/token", "state", "KV", "active", "peak", "of bandwidth"]
    titles += [f"prefill x {NAME}", f"decode x {NAME}", f"peak x {NAME}"] if versus else []
    for title in titles:
        table.add_column(title, justify="right", no_wrap=not versus)
    before = None
    for row in report.rows:
        name = row.mode if row.library == Ours.name else f"  {row.library}"
        ours = row.library == Ours.name
        peer = report.find(NAME, row.mode, row.context) if versus and ours else None
        table.add_row(
            name if not (ours and row.mode == before) else "", mark(row), *cells(row), *ratios(row, peer, versus),
            style="dim" if row.kind == PREDICTED or not ours else "",
        )  # fmt: skip
        before = row.mode if ours else before
    return table


def mark(row: Row) -> str:
    return {PREDICTED: "~", FILLED: "*"}.get(row.kind, " ") + short(row.context)


def cells(row: Row) -> list[str]:
    rate = "-" if row.prefill_tps is None else f"{row.prefill_tps:,.0f}"
    pace = "-" if row.decode_ms is None else f"{row.decode_ms:,.2f}"
    share = "-" if row.bandwidth_share is None else f"{row.bandwidth_share:.0%}"
    return [rate, pace, size(row.state_bytes), size(row.kv_bytes), size(row.active_bytes), size(row.peak_bytes), share]


def ratios(row: Row, peer: Row | None, versus: bool) -> Sequence[str]:
    """How many times faster, and how many times less memory beside the weights at the peak."""
    if not versus:
        return ()
    if peer is None:
        return ("", "", "")
    prefill = f"{row.prefill_tps / peer.prefill_tps:.2f}" if row.prefill_tps and peer.prefill_tps else "-"
    return (prefill, f"{peer.decode_ms / row.decode_ms:.2f}", f"{beside_weights(peer) / beside_weights(row):.2f}")


def beside_weights(row: Row) -> int:
    """Bytes at the peak without the weights: state, cache and whatever was needed for a moment."""
    return row.peak_bytes - row.active_bytes + row.state_bytes + row.kv_bytes
