from __future__ import annotations

import mlx.core as mx

from ..spec import RopeSpec


def rotate(x, rope: RopeSpec | None, span):
    """Rotary positions of the span's tokens on x [B, heads, T, D]."""
    if rope is None:
        return x
    return mx.fast.rope(x, rope.dims, traditional=rope.interleaved, base=rope.theta, scale=1.0, offset=span.offset)
