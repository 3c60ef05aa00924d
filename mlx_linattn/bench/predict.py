"""Rows that were not run. Bytes are arithmetic on the model's shapes; times are straight lines through what was measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .. import budget
from ..model import Model
from ..state import KVOptions
from .memory import active
from .rows import PREDICTED, Row
from .sides import Ours

TIMES = "times of predicted rows: straight lines through the measured ones, level where nothing grows; bytes: arithmetic on shapes"


def seconds_to_read(rows: Sequence[Row], begin: int, end: int) -> float | None:
    """Seconds to read the tokens from ``begin`` to ``end``, by what earlier intervals took; None where there are none."""
    read = [row for row in rows if row.prefill_tps]
    if not read or end <= begin:
        return None
    middles = [row.context - row.read / 2 for row in read]
    return (end - begin) * _line(read, middles, [1 / row.prefill_tps for row in read], (begin + end) / 2)


def _line(rows: Sequence[Row], x: Sequence[float], y: Sequence[float], at: float) -> float:
    """On the least-squares line through the points of ``rows``; their mean where no cache grows, or the line would fall."""
    if len(x) > 1 and any(row.kv_bytes for row in rows):
        slope, start = np.polyfit(x, y, 1)
        if slope > 0:
            return float(start + slope * at)
    return float(np.mean(y))


def predicted(
    model: Model, options: KVOptions, mode: str, rows: Sequence[Row], contexts: Sequence[int], step: int
) -> list[Row]:
    """Our rows for ``contexts``, from those that were run in this mode (``rows``, by context)."""
    made, before = [], max((row.context for row in rows), default=0)
    held = active(collect=True)
    seen = max(
        (row.peak_bytes - row.active_bytes for row in rows), default=0
    )  # pieces of a prompt need no more later on
    for context in contexts:
        state = model.make_cache(options)
        state.reserve(context)
        need = budget.estimate(model, state, context, step)
        fixed = budget.fixed_nbytes(model, state)
        seconds = seconds_to_read(rows, before, context)
        pace = _line(rows, [row.context for row in rows], [row.decode_ms for row in rows], context) if rows else None
        made.append(
            Row(
                library=Ours.name,
                mode=mode,
                context=context,
                read=context - before,
                prefill_tps=(context - before) / seconds if seconds else None,
                decode_ms=pace,
                state_bytes=fixed,
                kv_bytes=need.state - fixed,
                active_bytes=held + need.state,
                peak_bytes=held + need.state + max(need.temporary, seen),
                kind=PREDICTED,
            )
        )
        before = context
    return made
