"""The operations as their formulas, in float32, one token at a time. Slow, short and trusted: everything else equals this."""

from __future__ import annotations

import mlx.core as mx


def recurrence(q, k, v, decay, beta, state, delta):
    """S_t = a_t * S_{t-1} + b_t (v_t - d a_t * S_{t-1} k_t) k_t^T,  o_t = S_t q_t;  S is [Dv, Dk], so a_t scales its columns.

    q, k [B, T, Hv, Dk]; v [B, T, Hv, Dv]; decay [B, T, Hv, 1 or Dk]; beta [B, T, Hv]; state [B, Hv, Dv, Dk]; all float32.
    """
    outputs = []
    for t in range(q.shape[1]):
        q_t, k_t, v_t = q[:, t], k[:, t], v[:, t]
        state = state * decay[:, t, :, None, :]
        recalled = (state * k_t[:, :, None, :]).sum(-1) if delta else 0  # [B, Hv, Dv]
        update = beta[:, t, :, None] * (v_t - recalled)
        state = state + update[..., None] * k_t[:, :, None, :]
        outputs.append((state * q_t[:, :, None, :]).sum(-1))
    return mx.stack(outputs, axis=1), state


def short_conv(past, weight, T):
    """y_t = sum_i weight[:, i] * past_{t+i}; past [B, K-1+T, C] begins with the window, weight [C, K]."""
    K = weight.shape[1]
    return mx.stack([(past[:, t : t + K] * weight.T).sum(1) for t in range(T)], axis=1)


def diagonal_scan(a, u, state):
    """h_t = a_t * h_{t-1} + u_t; a, u [B, T, W], state [B, W]."""
    outputs = []
    for t in range(a.shape[1]):
        state = a[:, t] * state + u[:, t]
        outputs.append(state)
    return mx.stack(outputs, axis=1), state


def selective_scan(x, delta, A, B, C, state):
    """h_t = exp(delta_t A) h_{t-1} + delta_t x_t B_t,  y_t = C_t . h_t; x, delta [B, T, inner], A [inner, N], B, C [B, T, N]."""
    outputs = []
    for t in range(x.shape[1]):
        decay = mx.exp(delta[:, t, :, None] * A)
        state = decay * state + (delta * x)[:, t, :, None] * B[:, t, None, :]
        outputs.append((state * C[:, t, None, :]).sum(-1))
    return mx.stack(outputs, axis=1), state


def attention(q, k, v, scale, mask):
    """softmax(scale q k^T + mask) v; q [B, H, T, D], k, v [B, Hkv, S, D], mask [B or 1, 1, T, S] of booleans."""
    groups = q.shape[1] // k.shape[1]
    k, v = mx.repeat(k, groups, axis=1), mx.repeat(v, groups, axis=1)
    scores = scale * (q @ k.swapaxes(-1, -2))
    return mx.softmax(mx.where(mask, scores, -mx.inf), axis=-1) @ v
