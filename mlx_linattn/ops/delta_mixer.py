"""Everything between the projections of a gated-delta layer, as one operation that a kernel can take over whole."""

from __future__ import annotations

import mlx.core as mx

from . import dispatch, mixer_kernels
from .conv import short_conv
from .gates import delta_decay, write_strength
from .norm import norm_then_gate, rms_norm
from .recurrence import recurrence


def delta_mixer(
    qkv, a, b, z, *, conv_weight, A_log, dt_bias, norm_weight, window, state,
    key_heads: int, value_heads: int, key_dim: int, value_dim: int,
    lower_bound: float | None = None, beta_scale: float = 1.0, output_gate: str = "silu", eps: float = 1e-6, lengths=None,
    snapshots: bool = False,
):  # fmt: skip
    """Short convolution, l2-norms, gates, delta rule and gated norm (Gated DeltaNet; with a vector gate, Kimi Delta Attention).

        [q | k | v] = silu(conv(qkv));  q = l2(q) Dk^-1/2;  k = l2(k)
        S = decay * S;  S = S + k (x) beta (v - S^T k);  o = S^T q
        y = rms_norm(o) * norm_weight * output_gate(z)

    Args:
        qkv: [B, T, 2 Hk Dk + Hv Dv].  b: [B, T, Hv].
        a: [B, T, Hv] or [B, T, Hv Dk] (vector decay); None for decay 1 (DeltaNet), then A_log and dt_bias are None too.
        z: [B, T, Hv Dv]; None for y = rms_norm(o) * norm_weight.
        conv_weight: [2 Hk Dk + Hv Dv, K].  A_log: [Hv].  dt_bias: as a's last axis.  norm_weight: [Dv] float32.
        window: [B, K-1, 2 Hk Dk + Hv Dv] or None.  state: [B, Hv, Dv, Dk] float32 or None.
        lower_bound: None for the softplus gate.  beta_scale: 2 where beta reaches 2.  output_gate: "silu" or "sigmoid".
        lengths: [B] integers, real tokens of each right-padded row.
        snapshots: return the window [B, T, K-1, C] and the state [B, T, Hv, Dv, Dk] after every token instead of after
            the last, so that a draft of which only n tokens are kept continues from [:, n - 1].

    Returns:
        y [B, T, Hv Dv] in qkv's dtype, the new window and the new state.
    """
    B, T, _ = qkv.shape
    gate = "none" if a is None else "scalar" if a.shape[-1] == value_heads else "vector"
    row = dispatch.choose(
        dispatch.Call(
            "delta_mixer", T, B * value_heads, key_dim, value_dim, gate, True, qkv.dtype, conv_weight.shape[1]
        )
    )
    return PATHS[row.path](
        qkv, a, b, z, conv_weight=conv_weight, A_log=A_log, dt_bias=dt_bias, norm_weight=norm_weight, window=window,
        state=state, key_heads=key_heads, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim,
        lower_bound=lower_bound, beta_scale=beta_scale, output_gate=output_gate, eps=eps, lengths=lengths,
        snapshots=snapshots, **row.options,
    )  # fmt: skip


def _composed(qkv, a, b, z, *, window, state, lengths, snapshots, **arguments):
    """The operations one after another."""
    T = qkv.shape[1]
    if not snapshots:
        return _tokens(qkv, a, b, z, window=window, state=state, lengths=lengths, **arguments)
    steps = []
    for t in range(T):
        now = slice(t, t + 1)
        left = None if lengths is None else mx.clip(lengths - t, 0, 1)
        y, window, state = _tokens(
            *(None if x is None else x[:, now] for x in (qkv, a, b, z)),
            window=window,
            state=state,
            lengths=left,
            **arguments,
        )
        steps.append((y[:, 0], window, state))
    return tuple(mx.stack(parts, axis=1) for parts in zip(*steps))


def _tokens(
    qkv, a, b, z, *, conv_weight, A_log, dt_bias, norm_weight, window, state, key_heads, value_heads, key_dim, value_dim,
    lower_bound, beta_scale, output_gate, eps, lengths,
):  # fmt: skip
    B, T, _ = qkv.shape
    qkv, window = short_conv(qkv, conv_weight, window=window, lengths=lengths)
    keys = key_heads * key_dim
    qk, v = mx.split(qkv, [2 * keys], axis=-1)
    # l2(x) = rms(x) D^-1/2; both at once, q with its further D^-1/2
    qk = mx.fast.rms_norm(qk.reshape(B, T, 2, key_heads, key_dim).astype(mx.float32), None, 1e-6 / key_dim)
    q, k = mx.split(qk * mixer_kernels.numbers(mx.float32, 1 / key_dim, key_dim**-0.5)[:, None, None], 2, axis=2)
    if a is not None and a.shape[-1] != value_heads:
        a, dt_bias = a.reshape(B, T, value_heads, key_dim), dt_bias.reshape(value_heads, key_dim)
    decay = None if a is None else delta_decay(a, A_log, dt_bias, lower_bound)
    v = v.reshape(B, T, value_heads, value_dim)
    beta = write_strength(b, beta_scale)
    o, state = recurrence(q.squeeze(2), k.squeeze(2), v, decay, beta, state, delta=True, lengths=lengths)
    if z is None:
        y = rms_norm(o, norm_weight, eps)
    else:
        y = norm_then_gate(o, norm_weight, z.reshape(B, T, value_heads, value_dim), eps, output_gate)
    return y.reshape(B, T, value_heads * value_dim), window, state


#: The paths that the dispatch table names.
PATHS = {"reference": _composed, "composed": _composed, "fused_step": mixer_kernels.delta_step}
