"""Launches of the scans (metal/scan.metal)."""

from __future__ import annotations

import mlx.core as mx

from .. import metal
from .dispatch import device
from .mixer_kernels import numbers


def diagonal(decay, update, state, lengths, groups=16, tokens=8):
    """scan.diagonal_scan; arguments as there, all in place. ``groups`` SIMD-groups take ``tokens`` tokens each."""
    B, T, W = update.shape
    groups = min(groups, 1 << (-(-T // tokens) - 1).bit_length())
    return metal.kernel("scan/diagonal_scan", device())(
        inputs=[decay, update, state, *_sizes(B, T, W, lengths)],
        template=[("UT", update.dtype), ("GROUPS", groups), ("TOKENS", tokens)],
        grid=(32 * groups, -(-W // 32), B),
        threadgroup=(32 * groups, 1, 1),
        output_shapes=[update.shape, state.shape],
        output_dtypes=[update.dtype, mx.float32],
    )


def selective(x, delta, A, B, C, D, state, lengths, lanes=4, tokens=32):
    """scan.selective_scan; arguments as there, all in place but D. ``lanes`` lanes share a channel's state."""
    rows, T, inner = x.shape
    N = A.shape[1]
    return metal.kernel("scan/selective_scan", device())(
        inputs=[x, delta, A, B, C, state if D is None else D, state, *_sizes(rows, T, inner, lengths)],
        template=[("XT", x.dtype), ("N", N), ("LANES", lanes), ("TOKENS", tokens), ("SKIP", D is not None)],
        grid=(32 * lanes, -(-inner // 32), rows),
        threadgroup=(32 * lanes, 1, 1),
        output_shapes=[x.shape, state.shape],
        output_dtypes=[x.dtype, mx.float32],
    )


def _sizes(B, T, channels, lengths):
    lengths = numbers(mx.int32, *[T] * B) if lengths is None else lengths.astype(mx.int32)
    return lengths, numbers(mx.int32, T, channels)
