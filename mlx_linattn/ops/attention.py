"""Causal attention over a cache whose temporary memory does not grow with the context."""

from __future__ import annotations

import mlx.core as mx

from . import reference
from .backend import forced_backend

TILE = 1024  # keys whose scores exist at one time
MASKED = -1e30  # finite, so that a tile without any visible key leaves no NaN behind


def attention(q, k, v, *, scale: float, starts: tuple[int, ...], window: int | None = None, first=None):
    """softmax(scale q k^T) v, where query i of row r stands at column starts[r] + i of the keys and sees none after it.

    Args:
        q: [B, H, T, D].  k: [B, Hkv, S, D].  v: [B, Hkv, S, Dv].
        starts: one integer a row; S >= max(starts) + T.
        window: how many columns a query sees at most, its own included; None for all.
        first: one integer a row, the first column that means anything; None for 0.

    Returns:
        [B, H, T, Dv] in q's dtype. Scores and softmax are float32 (Milakov and Gimelshein 2018 for the running form).
    """
    T, S = q.shape[2], k.shape[2]
    if window is not None and window >= S:
        window = None
    if forced_backend() == "reference":
        mask = _visible(starts, T, 0, S, window, first)
        o = reference.attention(*(x.astype(mx.float32) for x in (q, k, v)), scale, mask)
        return o.astype(q.dtype)
    if window is not None and T > TILE:  # a block of queries at a time, against the keys that it can see
        blocks = []
        for begin in range(0, T, TILE):
            end = min(begin + TILE, T)
            low, high = max(0, min(starts) + begin - window + 1), max(starts) + end
            block_starts = tuple(start + begin - low for start in starts)
            block_first = None if first is None else tuple(max(0, column - low) for column in first)
            keys, values = k[:, :, low:high], v[:, :, low:high]
            query = q[:, :, begin:end]
            blocks.append(
                attention(query, keys, values, scale=scale, starts=block_starts, window=window, first=block_first)
            )
        return mx.concatenate(blocks, axis=2)
    even = len(set(starts)) == 1 and starts[0] + T == S and window is None and first is None
    if T == 1 or S <= TILE:
        mask = None if even and T == 1 else "causal" if even else _visible(starts, T, 0, S, window, first)
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
    return _tiled(q, k, v, scale, starts, window, first)


def _visible(starts, T, begin, end, window=None, first=None):
    """[B, 1, T, end - begin] of booleans: may query i see key j?"""
    columns = (mx.array(starts)[:, None] + mx.arange(T))[..., None]
    keys = mx.arange(begin, end)
    visible = keys <= columns
    if window is not None:
        visible = visible & (keys > columns - window)
    if first is not None:
        visible = visible & (keys >= mx.array(first)[:, None, None])
    return visible[:, None]


def _tiled(q, k, v, scale, starts, window, first):
    B, H, T, D = q.shape
    Hkv, S = k.shape[1:3]
    rows = (H // Hkv) * T  # the query heads of one key head, one under the other
    q = (q.astype(mx.float32) * scale).reshape(B, Hkv, rows, D)
    best = mx.full((B, Hkv, rows, 1), MASKED)
    total, out = mx.zeros((B, Hkv, rows, 1)), mx.zeros((B, Hkv, rows, v.shape[-1]))
    for begin in range(0, S, TILE):
        end = min(begin + TILE, S)
        scores = q @ k[:, :, begin:end].astype(mx.float32).swapaxes(-1, -2)
        if end - 1 > min(starts) or window is not None or first is not None:
            visible = mx.tile(_visible(starts, T, begin, end, window, first), (1, 1, H // Hkv, 1))
            scores = mx.where(visible, scores, MASKED)
        new_best = mx.maximum(best, scores.max(-1, keepdims=True))
        weights, shrink = mx.exp(scores - new_best), mx.exp(best - new_best)
        total = shrink * total + weights.sum(-1, keepdims=True)
        out = shrink * out + weights @ v[:, :, begin:end].astype(mx.float32)
        best = new_best
    return (out / total).reshape(B, H, T, -1).astype(v.dtype)
