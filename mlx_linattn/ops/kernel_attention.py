"""Kernel linear attention: softmax attention with exp(<q, k>) replaced by <phi(q), phi(k)>, which makes it a recurrence.

    o_t = sum_{s <= t} <phi(q_t), phi(k_s)> v_s / sum_{s <= t} <phi(q_t), phi(k_s)>          (Katharopoulos et al. 2020)

The numerator is the matrix-state recurrence without decay, the denominator Z the same recurrence with v = 1. Both are
one state here: v gets a last channel of ones, whose row of S is Z.
"""

from __future__ import annotations

import mlx.core as mx

from ..errors import RequestError, ShapeError
from .recurrence import recurrence

FEATURE_MAPS = {
    "identity": lambda x: x,
    "elu": lambda x: mx.where(x > 0, x + 1, mx.exp(mx.minimum(x, 0.0))),  # elu(x) + 1
    "relu": lambda x: mx.maximum(x, 0.0),
    "silu": lambda x: x * mx.sigmoid(x),
}
NOTHING_SEEN = -1e30  # the peak before the first token: finite, so that no padded row turns into NaN


def map_features(x, name: str):
    """One of FEATURE_MAPS of x, in float32. ("exp" exists inside :func:`kernel_attention` only, where it cannot overflow.)"""
    if name not in FEATURE_MAPS:
        raise RequestError(f"feature map {name!r} is not known; choose one of {', '.join((*FEATURE_MAPS, 'exp'))}")
    return FEATURE_MAPS[name](x.astype(mx.float32))


def kernel_attention(q, k, v, state=None, *, feature_map: str = "elu", lengths=None):
    """Normalised kernel linear attention over T tokens from ``state``; whole, in pieces or token by token it is the same.

    Args:
        q, k: [B, T, Hk, Dk], before the feature map; value head h uses key head h // (Hv / Hk).
        v: [B, T, Hv, Dv].
        state: what the last call returned, None at the start: ([B, Hv, Dv + 1, Dk] float32, S with Z as its last row),
            and for "exp" also [B, Hk, Dk] float32, the largest log feature of k so far.
        feature_map: "elu" (elu(x) + 1), "relu", "silu", "exp" (exp(x / sqrt(Dk))), or "identity" for q and k that a
            learned map made. Where all weights of a token are 0 its output is 0.
        lengths: [B] integers; tokens at and after a row's length change nothing, and their outputs mean nothing.

    Returns:
        o [B, T, Hv, Dv] in v's dtype, and the new state.

    Raises:
        RequestError: an unknown feature map.  ShapeError: shapes that do not fit together.
    """
    decay, peak = None, None
    matrix = None if state is None else state[0]
    if q.shape != k.shape or v.shape[:2] != k.shape[:2]:
        raise ShapeError(f"kernel_attention: q {q.shape}, k {k.shape} and v {v.shape} do not fit together")
    if feature_map == "exp":
        q, k, decay, peak = _exponentials(q, k, v.shape[2], None if state is None else state[1], lengths)
    else:
        q, k = map_features(q, feature_map), map_features(k, feature_map)
        # A factor of q cancels in the quotient; without one, tiny features would underflow.
        q = q / mx.maximum(mx.abs(q).max(-1, keepdims=True), 1e-30)
    ones = mx.ones((*v.shape[:-1], 1))
    v32 = mx.concatenate([v.astype(mx.float32), ones], axis=-1)
    o, matrix = recurrence(q, k, v32, decay, None, matrix, delta=False, lengths=lengths)
    total = o[..., -1:]
    o = o[..., :-1] / mx.where(total == 0, 1.0, total)
    return o.astype(v.dtype), (matrix,) if peak is None else (matrix, peak)


def _exponentials(q, k, value_heads, peak, lengths):
    """exp(x / sqrt(Dk)) without overflow, as a recurrence with one decay a channel.

    Each feature of k is kept relative to its largest value so far, the peak m_t = max(m_{t-1}, k_t): it enters as
    exp(k_t - m_t), and what came before decays by exp(m_{t-1} - m_t). The query brings exp(m_t) back, up to a factor
    that cancels in the quotient: exp(q_t + m_t - max). No number here is above 1.
    """
    B, T, Hk, Dk = k.shape
    q, k = (x.astype(mx.float32) * Dk**-0.5 for x in (q, k))
    peak = mx.full((B, Hk, Dk), NOTHING_SEEN) if peak is None else peak
    if lengths is not None:
        real = (mx.arange(T) < lengths[:, None])[..., None, None]
        k = mx.where(real, k, NOTHING_SEEN)
    peaks = mx.cummax(mx.concatenate([peak[:, None], k], axis=1), axis=1)  # [B, 1 + T, Hk, Dk]
    before, now = peaks[:, :-1], peaks[:, 1:]
    q = q + now
    decay = mx.repeat(mx.exp(before - now), value_heads // Hk, axis=2)
    return mx.exp(q - q.max(-1, keepdims=True)), mx.exp(k - now), decay, mx.contiguous(peaks[:, -1])
