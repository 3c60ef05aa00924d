"""Causal depthwise short convolution that carries its last K-1 inputs."""

from __future__ import annotations

import mlx.core as mx

from ..errors import ShapeError
from . import dispatch, gates, mixer_kernels, reference


def short_conv(x, weight, bias=None, window=None, *, silu: bool = True, lengths=None):
    """y_t = silu(sum_i weight[:, i] x_{t-K+1+i} + bias), computed in float32.

    Args:
        x: [B, T, C].  weight: [C, K], the last tap multiplies the current token.  bias: [C] or None.
        window: [B, K-1, C], the inputs before x, oldest first; None for zeros.
        lengths: [B] integers; inputs at and after a row's length never enter its window.

    Returns:
        y [B, T, C] and the new window [B, K-1, C], both in x's dtype.
    """
    B, T, C = x.shape
    K = weight.shape[1]
    if weight.shape[0] != C:
        raise ShapeError(
            f"short_conv: weight has shape {tuple(weight.shape)}, expected ({C}, K) for x {tuple(x.shape)}"
        )
    window = mx.zeros((B, K - 1, C), x.dtype) if window is None else window
    if tuple(window.shape) != (B, K - 1, C):
        raise ShapeError(f"short_conv: window has shape {tuple(window.shape)}, expected {(B, K - 1, C)}")
    row = dispatch.choose(dispatch.Call("short_conv", T, -(-B * C // 32), dtype=x.dtype, taps=K))
    return PATHS[row.path](x, weight, bias, window.astype(x.dtype), silu, lengths, **row.options)


def _plain(run):
    def path(x, weight, bias, window, silu, lengths):
        K, T = weight.shape[1], x.shape[1]
        past = mx.concatenate([window, x], axis=1)  # [B, K-1+T, C]
        y = run(past.astype(mx.float32), weight.astype(mx.float32), T)
        y = y if bias is None else y + bias.astype(mx.float32)
        y = gates.silu(y) if silu else y
        if lengths is None:
            # A copy, and not a view of `past`, which would keep a whole prompt's activations alive; mx.contiguous makes
            # none where the parent is only a little larger.
            window = mx.take(past, mx.arange(T, T + K - 1), axis=1)
        else:
            rows = lengths[:, None] + mx.arange(K - 1)  # row r's last K-1 real inputs end at K-1 + lengths[r]
            window = mx.take_along_axis(past, rows[..., None], axis=1)
        return y.astype(x.dtype), window

    return path


def _taps(past, taps, T):
    if T == 1:
        return (past * taps.T).sum(1, keepdims=True)
    return sum(past[:, i : i + T] * taps[:, i] for i in range(taps.shape[1]))


#: The paths that the dispatch table names.
PATHS = {
    "reference": _plain(reference.short_conv),
    "taps": _plain(_taps),
    "channels": mixer_kernels.short_conv,
}
