from __future__ import annotations

import mlx.core as mx

from .. import ops
from ..state import KVState, Span, WindowState

BLOCK = 1024  # queries that go through a window at one time


def attend(q, new: tuple[mx.array, ...], state: KVState | WindowState, span: Span, scale: float):
    """Store what the tokens of ``span`` bring and let their queries see what the state keeps.

    q: [B, H, T, D].  new: (keys [B, Hkv, T, D], values [B, Hkv, T, Dv]), or one array that is both.  Returns [B, H, T, Dv].
    """
    if not isinstance(state, WindowState) or span.T <= BLOCK:
        columns, seen = state.append(span, *new)
        return ops.attention(q, columns[0], columns[-1], scale=scale, **seen)
    # A long prompt goes through a window piece by piece, so that the work grows with its length, not with the square of it.
    pieces = []
    for begin, end, part in span.blocks(BLOCK):
        columns, seen = state.append(part, *(x[:, :, begin:end] for x in new))
        pieces.append(ops.attention(q[:, :, begin:end], columns[0], columns[-1], scale=scale, **seen))
    return mx.concatenate(pieces, axis=2)
