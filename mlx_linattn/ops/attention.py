"""Causal attention over a cache whose temporary memory does not grow with the context."""

from __future__ import annotations

import mlx.core as mx

from . import reference
from .backend import forced_backend
from .columns import Columns

# Keys whose scores exist at one time, and queries that are treated at one time. On a GPU each step is several launches, and
# memory is freed in order; on a CPU MLX runs ahead and holds the arrays of about ten operations.
TILE, GPU_TILE = 256, 1024
BLOCK, GPU_BLOCK = 256, 512
FEW, DECODE_TILE, GPU_DECODE_TILE = 8, 16 * 1024, 128 * 1024  # queries that are few, and keys at one time for them
FUSED = (64, 80, 128)  # head widths for which MLX has a kernel that never stores scores, and chooses it by itself
MASKED = -1e30  # finite, so that a tile without any visible key leaves no NaN behind


def attention(
    q,
    k,
    v,
    *,
    scale: float,
    starts: tuple[int, ...],
    positions=None,
    window: int | None = None,
    sinks: int = 0,
    mask=None,
):
    """softmax(scale q k^T) v, where query i of row r stands at position starts[r] + i and sees no key after it.

    Args:
        q: [B, H, T, D].  k: [B, Hkv, S, D].  v: [B, Hkv, S, Dv].  k and v are arrays, or :class:`Columns`.
        starts: one integer a row.
        positions: [B, S] integers, where each key stands, -1 for an empty column; None where key j stands at j,
            and then S >= max(starts) + T.
        mask: [B, 1, T, S] booleans, what all this comes to, where k and v are arrays and the caller has made it once for many calls.
        window: how many positions a query sees at most, its own included, besides the first ``sinks``; None for all.

    Returns:
        [B, H, T, Dv] in v's dtype. Scores and softmax are float32 (Milakov and Gimelshein 2018 for the running form).
    """
    T, S = q.shape[2], k.shape[2]
    if forced_backend() == "reference":
        visible = _visible(starts, T, 0, S, positions, window, sinks)
        k, v = (x.floats() if isinstance(x, Columns) else x for x in (k, v))
        o = reference.attention(*(x.astype(mx.float32) for x in (q, k, v)), scale, visible)
        return o.astype(v.dtype)
    if mask is not None:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
    whole = isinstance(k, mx.array) and positions is None and window is None
    fused = T == 1 or S <= TILE or (q.shape[-1] == v.shape[-1] and q.shape[-1] in FUSED and _on_gpu())
    if whole and fused and len(set(starts)) == 1 and starts[0] + T == S:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=None if T == 1 else "causal")
    if isinstance(k, mx.array) and S <= TILE:
        mask = _visible(starts, T, 0, S, positions, window, sinks)
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
    blocks = []
    size = block_sizes()[0]
    for begin in range(0, T, size):
        query = q[:, :, begin : begin + size]
        if blocks:  # one block after the other
            query = mx.depends(query, blocks[-1])
        first = tuple(start + begin for start in starts)
        blocks.append(_tiled(query, k, v, scale, first, positions, window, sinks))
    return blocks[0] if len(blocks) == 1 else mx.concatenate(blocks, axis=2)


def block_sizes() -> tuple[int, int]:
    """(queries, keys) whose scores exist at one time on the default device."""
    return (GPU_BLOCK, GPU_TILE) if _on_gpu() else (BLOCK, TILE)


def _decode_tile() -> int:
    return GPU_DECODE_TILE if _on_gpu() else DECODE_TILE


def _on_gpu() -> bool:
    return mx.default_device().type == mx.DeviceType.gpu


def _part(x, begin: int, end: int, few: bool):
    """Columns begin to end. Quantized ones stay so for a few queries, which read each number once."""
    if not isinstance(x, Columns):
        return x[:, :, begin:end].astype(mx.float32)
    part = x.part(begin, end)
    return part if few else part.floats().astype(mx.float32)


def _dot(q, keys):
    return keys.dot(q) if isinstance(keys, Columns) else q @ keys.swapaxes(-1, -2)


def _weigh(weights, values):
    return values.weigh(weights) if isinstance(values, Columns) else weights @ values


def _visible(starts, T, begin, end, positions, window, sinks):
    """[B, 1, T, end - begin] of booleans: may query i see key j?"""
    query = (mx.array(starts)[:, None] + mx.arange(T))[..., None]
    key = mx.arange(begin, end) if positions is None else positions[:, None, begin:end]
    visible = key <= query
    if positions is not None:
        visible = visible & (key >= 0)
    if window is not None:
        visible = visible & ((key > query - window) | (key < sinks))
    return visible[:, None]


def _tiled(q, k, v, scale, starts, positions, window, sinks):
    B, H, T, D = q.shape
    Hkv, S = k.shape[1:3]
    rows = (H // Hkv) * T  # the query heads of one key head, one under the other
    q = (q.astype(mx.float32) * scale).reshape(B, Hkv, rows, D)
    best = mx.full((B, Hkv, rows, 1), MASKED)
    total, out = mx.zeros((B, Hkv, rows, 1)), mx.zeros((B, Hkv, rows, v.shape[-1]))
    few = T <= FEW
    tile = _decode_tile() if few else block_sizes()[1]
    last = S if positions is not None else min(S, max(starts) + T)
    for begin in range(0, last, tile):
        end = min(begin + tile, last)
        keys, values = (_part(x, begin, end, few) for x in (k, v))
        # One tile after the other: MLX may else make the scores of many before it uses those of the first.
        query = mx.depends(q, [out, total]) if begin else q
        scores = _dot(query, keys)
        if positions is not None or window is not None or end - 1 > min(starts):
            visible = mx.tile(_visible(starts, T, begin, end, positions, window, sinks), (1, 1, H // Hkv, 1))
            scores = mx.where(visible, scores, MASKED)
        new_best = mx.maximum(best, scores.max(-1, keepdims=True))
        weights, shrink = mx.exp(scores - new_best), mx.exp(best - new_best)
        total = shrink * total + weights.sum(-1, keepdims=True)
        out = shrink * out + _weigh(weights, values)
        best = new_best
    return (out / total).reshape(B, H, T, -1).astype(v.dtype)
