"""The matrix-state recurrence in chunks of C tokens, in plain MLX, for any device and shape.

Inside a chunk (row i = token, P_i = product of decays up to and including i, Z_j = product after j,
D_ij = product over j < l <= i; all products of linear decays, so that decays of 0 are exact and nothing overflows):

    A_ij = beta_i <k_i, D_ij * k_j>  (i > j)          M_ij = <q_i, D_ij * k_j>  (i >= j)
    R = beta (V - (P * K) S)        (I + A) Delta = R
    O = (P * Q) S + M Delta         S <- P_C * S + (Z * K)^T Delta

(Yang et al. 2024, "Gated Delta Networks", and Kimi Team 2025, "Kimi Linear", without their W and U: one solve of R is
enough where one loop walks the chunks.) The unit lower triangular (I + A) is inverted from 4 x 4 blocks upwards: where
keys repeat and beta is 2, the terms of a Neumann series over n tokens reach 3^(n-1) before they cancel.
"""

from __future__ import annotations

import mlx.core as mx

BLOCK = 8  # tokens whose gated products are formed one diagonal at a time
GROUP = 1 << 18  # numbers of an array that a CPU's cache holds
SOLVE = 4  # tokens that one Neumann series inverts
SEGMENT = 2048  # tokens whose chunks are prepared at once


def unit_lower_inverse(A):
    """(I + A)^-1 of strictly lower triangular A [..., C, C], C = 8 * 2^n."""
    C = A.shape[-1]
    eye = mx.eye(SOLVE)
    N = _diagonal_blocks(A, SOLVE)  # [..., C/4, 4, 4]; N^4 = 0, so two factors are exact
    T = (eye - N) @ (eye + N @ N)
    size = SOLVE
    while size < C:
        left, right = T[..., 0::2, :, :], T[..., 1::2, :, :]
        below = _diagonal_blocks(A, 2 * size)[..., size:, :size]
        corner = -(right @ below @ left)
        top = mx.concatenate([left, mx.zeros_like(left)], axis=-1)
        T = mx.concatenate([top, mx.concatenate([corner, right], axis=-1)], axis=-2)
        size *= 2
    return T[..., 0, :, :]


def _diagonal_blocks(A, size):
    count = A.shape[-1] // size
    blocks = [A[..., i * size : (i + 1) * size, i * size : (i + 1) * size] for i in range(count)]
    return mx.stack(blocks, axis=-3)


def _grams_scalar(q, k, decay):
    """K K^T * D and Q K^T * D for one decay a token; q, k [B, Hk, N, C, Dk], decay [B, Hv, N, C]."""
    C = decay.shape[-1]
    repeats = decay.shape[1] // q.shape[1]
    rows = mx.arange(C)
    below = rows[:, None] > rows[None, :]
    D = mx.cumprod(mx.where(below, decay[..., None], 1.0), axis=-2)  # D_ij for i >= j
    keys = mx.contiguous(k.swapaxes(-1, -2))
    KK, QK = mx.repeat(k @ keys, repeats, axis=1), mx.repeat(q @ keys, repeats, axis=1)
    return KK * D, QK * D


def _grams_vector(q, k, decay):
    """The same for one decay a channel; q, k, decay [B, H, N, C, Dk].

    Inside 8 x 8 diagonal blocks the product is carried along each diagonal; below them it splits at the start of the
    row's block into two factors that are both products of decays.
    """
    C = decay.shape[-2]
    lead = decay.shape[:-2]

    def blocked(x):
        return x.reshape(*lead, C // BLOCK, BLOCK, x.shape[-1])

    qb, kb, ab = blocked(q), blocked(k), blocked(decay)
    carried = mx.ones_like(ab)  # row i holds the product over i-d < l <= i
    kk, qk = [], []
    for d in range(BLOCK):
        if d:
            carried = carried[..., 1:, :] * ab[..., 1 : BLOCK - d + 1, :]
        past = carried * kb[..., : BLOCK - d, :]
        pad = [(0, 0)] * (past.ndim - 2) + [(d, 0)]
        kk.append(mx.pad((kb[..., d:, :] * past).sum(-1), pad))
        qk.append(mx.pad((qb[..., d:, :] * past).sum(-1), pad))
    rows = mx.arange(BLOCK)
    back = mx.maximum(rows[:, None] - rows[None, :], 0)  # row i, column j lies on diagonal i - j
    index = mx.broadcast_to(back, (*lead, C // BLOCK, BLOCK, BLOCK))
    KK = mx.take_along_axis(mx.stack(kk, axis=-1), index, axis=-1)
    QK = mx.take_along_axis(mx.stack(qk, axis=-1), index, axis=-1)

    kk_rows, qk_rows = [], []
    for i in range(C // BLOCK):
        start = i * BLOCK
        parts_k, parts_q = [KK[..., i, :, :]], [QK[..., i, :, :]]
        if start:
            inside = mx.cumprod(ab[..., i, :, :], axis=-2)
            before = mx.cumprod(decay[..., :start, :], axis=-2, reverse=True, inclusive=False)
            keys = (before * k[..., :start, :]).swapaxes(-1, -2)
            parts_k.insert(0, (inside * kb[..., i, :, :]) @ keys)
            parts_q.insert(0, (inside * qb[..., i, :, :]) @ keys)
        if C - start - BLOCK:
            empty = mx.zeros((*lead, BLOCK, C - start - BLOCK))
            parts_k.append(empty)
            parts_q.append(empty)
        kk_rows.append(mx.concatenate(parts_k, axis=-1))
        qk_rows.append(mx.concatenate(parts_q, axis=-1))
    return mx.concatenate(kk_rows, axis=-2), mx.concatenate(qk_rows, axis=-2)


def recurrence(q, k, v, decay, beta, state, delta, chunk):
    """q, k [B, T, Hk, Dk]; v [B, T, Hv, Dv]; decay [B, T, Hv, 1 or Dk]; beta [B, T, Hv]; state [B, Hv, Dv, Dk]; float32.

    Returns o [B, T, Hv, Dv] and the state after the last token. ``chunk`` is C = 8 * 2^n.
    """
    outputs = []
    for start in range(0, v.shape[1], SEGMENT):
        inputs = [x[:, start : start + SEGMENT] for x in (q, k, v, decay, beta)]
        o, state = _segment(*inputs, state, delta, chunk)
        outputs.append(o)
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1), state


def _segment(q, k, v, decay, beta, state, delta, chunk):
    """All work that does not need the state is done for all chunks at once. The loop keeps S as [Dk, Dv], so that every
    product in it has its operands as they lie in memory: a BLAS without tuned kernels is twice as slow on transposed ones.
    """
    B, T, Hv, Dv = v.shape
    Hk = k.shape[2]
    C, N = chunk, -(-T // chunk)
    scalar = decay.shape[-1] == 1

    def chunks(x, fill=0.0):  # [B, T, H, ...] -> [B, H, N, C, ...]; a padded token changes nothing
        if N * C != T:
            x = mx.pad(x, [(0, 0), (0, N * C - T)] + [(0, 0)] * (x.ndim - 2), constant_values=fill)
        return mx.moveaxis(x, 2, 1).reshape(B, x.shape[2], N, C, *x.shape[3:])

    q, k, v, decay, beta = chunks(q), chunks(k), chunks(v), chunks(decay, 1.0), chunks(beta)[..., None]
    if scalar:  # key heads serve their value heads here, before they are repeated
        KK, QK = _grams_scalar(q, k, decay[..., 0])
    if Hk != Hv:
        q, k = mx.repeat(q, Hv // Hk, axis=1), mx.repeat(k, Hv // Hk, axis=1)
    if not scalar:  # some chunks at a time: these are many passes over the same numbers
        step = max(GROUP // (B * Hv * C * k.shape[-1]), 1)
        groups = [slice(n, n + step) for n in range(0, N, step)]
        parts = [_grams_vector(q[:, :, g], k[:, :, g], decay[:, :, g]) for g in groups]
        KK, QK = (mx.concatenate(x, axis=2) for x in zip(*parts))
    M = mx.tril(QK)
    P = mx.cumprod(decay, axis=-2)
    Z = mx.cumprod(decay, axis=-2, reverse=True, inclusive=False)
    total = P[..., -1:, :].swapaxes(-1, -2)  # [B, Hv, N, 1 or Dk, 1]
    rows = mx.concatenate([P * k, P * q], axis=-2) if delta else P * q
    keys = (Z * k).swapaxes(-1, -2)
    if delta:
        solve = unit_lower_inverse(mx.tril(beta * KK, -1)) * beta.swapaxes(-1, -2)
    else:
        update = beta * v

    S, outputs = state.swapaxes(-1, -2), []
    for n in range(N):
        seen = rows[:, :, n] @ S  # what the old state answers to this chunk's keys and queries
        if delta:
            W = solve[:, :, n] @ (v[:, :, n] - seen[..., :C, :])
            seen = seen[..., C:, :]
        else:
            W = update[:, :, n]
        outputs.append(mx.addmm(seen, M[:, :, n], W))
        S = mx.addmm(total[:, :, n] * S, keys[:, :, n], W)
    o = mx.stack(outputs, axis=1)  # [B, N, Hv, C, Dv]
    o = o.swapaxes(2, 3).reshape(B, N * C, Hv, Dv)
    return o[:, :T], mx.contiguous(S.swapaxes(-1, -2))
