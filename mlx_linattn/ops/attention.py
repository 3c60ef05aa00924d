"""Causal attention over a cache whose temporary memory does not grow with the context."""

from __future__ import annotations

import mlx.core as mx

from . import reference
from .backend import forced_backend

TILE = 1024  # keys whose scores exist at one time
MASKED = -1e30  # finite, so that a tile without any visible key leaves no NaN behind


def attention(q, k, v, *, scale: float, starts: tuple[int, ...]):
    """softmax(scale q k^T) v, where query i of row r stands at position starts[r] + i and sees the keys up to there.

    Args:
        q: [B, H, T, D].  k: [B, Hkv, S, D].  v: [B, Hkv, S, Dv].  Key j stands at position j.
        starts: one integer a row; S >= max(starts) + T.

    Returns:
        [B, H, T, Dv] in q's dtype. Scores and softmax are float32 (Milakov and Gimelshein 2018 for the running form).
    """
    T, S = q.shape[2], k.shape[2]
    even = len(set(starts)) == 1 and starts[0] + T == S
    if forced_backend() == "reference":
        o = reference.attention(*(x.astype(mx.float32) for x in (q, k, v)), scale, _visible(starts, T, 0, S))
        return o.astype(q.dtype)
    if T == 1 or S <= TILE:
        mask = None if even and T == 1 else "causal" if even else _visible(starts, T, 0, S)
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
    return _tiled(q, k, v, scale, starts)


def _visible(starts, T, first, last):
    """[B, 1, T, last - first] of booleans: may query i see key j?"""
    positions = mx.array(starts)[:, None] + mx.arange(T)
    return (mx.arange(first, last) <= positions[..., None])[:, None]


def _tiled(q, k, v, scale, starts):
    B, H, T, D = q.shape
    Hkv, S = k.shape[1:3]
    rows = (H // Hkv) * T  # the query heads of one key head, one under the other
    q = (q.astype(mx.float32) * scale).reshape(B, Hkv, rows, D)
    best = mx.full((B, Hkv, rows, 1), MASKED)
    total, out = mx.zeros((B, Hkv, rows, 1)), mx.zeros((B, Hkv, rows, v.shape[-1]))
    for first in range(0, S, TILE):
        last = min(first + TILE, S)
        scores = q @ k[:, :, first:last].astype(mx.float32).swapaxes(-1, -2)
        if last - 1 > min(starts):
            visible = mx.tile(_visible(starts, T, first, last), (1, 1, H // Hkv, 1))
            scores = mx.where(visible, scores, MASKED)
        new_best = mx.maximum(best, scores.max(-1, keepdims=True))
        weights, shrink = mx.exp(scores - new_best), mx.exp(best - new_best)
        total = shrink * total + weights.sum(-1, keepdims=True)
        out = shrink * out + weights @ v[:, :, first:last].astype(mx.float32)
        best = new_best
    return (out / total).reshape(B, H, T, -1).astype(v.dtype)
