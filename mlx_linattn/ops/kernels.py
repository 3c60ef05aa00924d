"""Launches of the recurrence kernels (metal/recurrence.metal, metal/chunked.metal): arguments, grid, template values."""

from __future__ import annotations

from math import gcd

import mlx.core as mx

from .. import metal
from .dispatch import device


def packed(q, k, v, decay, beta, state, delta, lengths, lanes=None):
    """Several lanes a row of the state, one token after another; arguments as :func:`recurrence.recurrence` documents."""
    B, T, Hv, Dv = v.shape
    Hk, Dk = k.shape[2:]
    lanes = lanes or (8 if Dk >= 128 else 4)  # at most 32 numbers of the state in a lane
    rows = 32 // lanes
    launch = metal.kernel("recurrence", device())
    return launch(
        inputs=[q, k, v, decay, beta, state, *_rows(B, T, lengths)],
        template=[
            ("KT", k.dtype), ("VT", v.dtype), ("Dk", Dk), ("Dv", Dv), ("Hk", Hk), ("Hv", Hv),
            ("LANES", lanes), ("VECTOR", decay.shape[-1] == Dk and decay.ndim == 4), ("DELTA", bool(delta)),
        ],
        grid=(32, Dv // rows, B * Hv),
        threadgroup=(32, gcd(4, Dv // rows), 1),
        output_shapes=[v.shape, state.shape],
        output_dtypes=[v.dtype, mx.float32],
    )  # fmt: skip


def _rows(B, T, lengths):
    lengths = mx.full((B,), T, mx.int32) if lengths is None else lengths.astype(mx.int32)
    return lengths, mx.array([T], mx.int32)
