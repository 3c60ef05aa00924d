"""The operations round the recurrence in NumPy float64, and checks of whatever backend is in force against them."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from helpers import assert_close

from mlx_linattn import ops

LOSS = {mx.float32: 2e-6, mx.float16: 2e-3, mx.bfloat16: 1e-2}  # of an output, relative to the largest


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def rms(x, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def as64(x):
    return None if x is None else np.array(x.astype(mx.float32), np.float64)


def close(got, want, within, what):
    assert_close(as64(got), want, within * max(1.0, np.abs(want).max(initial=0.0)), what)


# ---- short convolution and norms


def check_short_conv(B, T, C, K=4, bias=True, silu_after=True, lengths=None, dtype=mx.float32, seed=0):
    rng = np.random.default_rng(seed)
    x, window = (mx.array(normal(rng, *shape)).astype(dtype) for shape in ((B, T, C), (B, K - 1, C)))
    weight, shift = normal(rng, C, K), normal(rng, C) if bias else np.zeros(C, np.float32)
    y, new = ops.short_conv(
        x, mx.array(weight), mx.array(shift) if bias else None, window, silu=silu_after,
        lengths=None if lengths is None else mx.array(lengths),
    )  # fmt: skip
    past = np.concatenate([as64(window), as64(x)], axis=1)
    want = np.stack([(past[:, t : t + K] * weight.T).sum(1) + shift for t in range(T)], axis=1)
    assert y.dtype == new.dtype == dtype
    close(y, silu(want) if silu_after else want, LOSS[dtype], "y")
    for r in range(B):
        n = T if lengths is None else lengths[r]
        assert_close(as64(new[r]), past[r, n : n + K - 1], 0, "window")
    return y, new


def check_norm_then_gate(shape, activation="silu", dtype=mx.float32, seed=0):
    rng = np.random.default_rng(seed)
    x, gate, weight = mx.array(normal(rng, *shape)).astype(dtype), 3 * normal(rng, *shape), normal(rng, shape[-1])
    got = ops.norm_then_gate(x, mx.array(weight), mx.array(gate).astype(dtype), 1e-5, activation)
    opened = {"silu": silu, "sigmoid": sigmoid}[activation](as64(mx.array(gate).astype(dtype)))
    assert got.dtype == dtype
    close(got, rms(as64(x), 1e-5) * weight * opened, LOSS[dtype], "norm_then_gate")
    return (got,)


def check_gate_then_norm(shape, groups=1, dtype=mx.float32, seed=0):
    rng = np.random.default_rng(seed)
    x, gate = (mx.array(s * normal(rng, *shape)).astype(dtype) for s in (1, 3))
    weight = normal(rng, shape[-1])
    got = ops.gate_then_norm(x, mx.array(weight), gate, 1e-5, groups)
    opened = (as64(x) * silu(as64(gate))).reshape(*shape[:-1], groups, -1)
    assert got.dtype == dtype
    close(got, rms(opened, 1e-5).reshape(shape) * weight, LOSS[dtype], "gate_then_norm")
    return (got,)


# ---- scans


def diagonal_arrays(B, T, W, dtype=mx.float32, seed=0):
    rng = np.random.default_rng(seed)
    decay = rng.uniform(0, 1, (B, T, W)).astype(np.float32)
    for i, hard in enumerate((0.0, 1e-30, 1.0, 0.9999)):
        decay[:, i::7] = hard
    update, state = mx.array(normal(rng, B, T, W)).astype(dtype), normal(rng, B, W)
    return {"decay": mx.array(decay), "update": update, "state": mx.array(state)}


def diagonal_scan(decay, update, state):
    a, u, h = as64(decay), as64(update), as64(state)
    outputs = []
    for t in range(u.shape[1]):
        h = a[:, t] * h + u[:, t]
        outputs.append(h)
    return np.stack(outputs, 1)


def check_diagonal_scan(B, T, W, lengths=None, dtype=mx.float32, seed=0):
    given = diagonal_arrays(B, T, W, dtype, seed)
    h, new = ops.diagonal_scan(**given, lengths=None if lengths is None else mx.array(lengths))
    assert (h.dtype, new.dtype) == (dtype, mx.float32)
    check_rows(h, new, diagonal_scan(**given), None, as64(given["state"]), lengths, dtype)
    return h, new


def selective_arrays(B, T, inner, N, dtype=mx.float32, seed=0):
    rng = np.random.default_rng(seed)
    A = -np.exp(rng.uniform(-3, 3, (inner, N))).astype(np.float32)
    delta = np.log1p(np.exp(2 * normal(rng, B, T, inner) - 1))  # steps from almost nothing to a full reset
    delta[:, 3::5] = 1e3
    x, b, c = (mx.array(normal(rng, B, T, n)).astype(dtype) for n in (inner, N, N))
    skip, state = normal(rng, inner), normal(rng, B, inner, N)
    rest = {"delta": delta, "A": A, "D": skip, "state": state}
    return {"x": x, "B": b, "C": c} | {name: mx.array(array) for name, array in rest.items()}


def selective_scan(x, delta, A, B, C, D, state):
    """Outputs, and the state after every token."""
    x, delta, A, B, C, D, h = map(as64, (x, delta, A, B, C, D, state))
    outputs, states = [], []
    for t in range(x.shape[1]):
        h = np.exp(delta[:, t, :, None] * A) * h + (delta[:, t] * x[:, t])[..., None] * B[:, t, None, :]
        outputs.append((h * C[:, t, None, :]).sum(-1) + D * x[:, t])
        states.append(h)
    return np.stack(outputs, 1), np.stack(states, 1)


def check_selective_scan(B, T, inner, N, lengths=None, dtype=mx.float32, skip=True, seed=0):
    given = selective_arrays(B, T, inner, N, dtype, seed)
    y, states = selective_scan(**given | ({} if skip else {"D": mx.zeros(inner)}))
    got, new = ops.selective_scan(
        **given | ({} if skip else {"D": None}), lengths=None if lengths is None else mx.array(lengths)
    )
    assert (got.dtype, new.dtype) == (dtype, mx.float32)
    check_rows(got, new, y, states, as64(given["state"]), lengths, dtype)
    return got, new


def check_rows(y, state, want, states, before, lengths, dtype):
    """Outputs at real tokens, and the state after each row's last one."""
    assert np.isfinite(as64(y)).all()
    states = want if states is None else states
    for r, n in enumerate(lengths or [want.shape[1]] * len(want)):
        close(y[r, :n], want[r, :n], LOSS[dtype], "outputs")
        close(state[r], states[r, n - 1] if n else before[r], LOSS[mx.float32], "state")


# ---- the gated-delta mixer


def delta_mixer_arrays(B, T, Hk, Hv, Dk, Dv, K=4, vector=False, dtype=mx.float32, seed=0):
    rng = np.random.default_rng(seed)
    C, gates = 2 * Hk * Dk + Hv * Dv, Hv * Dk if vector else Hv
    half = {
        "qkv": (B, T, C), "a": (B, T, gates), "b": (B, T, Hv), "z": (B, T, Hv * Dv), "window": (B, K - 1, C)
    }  # fmt: skip
    full = {
        "conv_weight": (C, K), "A_log": (Hv,), "dt_bias": (gates,), "norm_weight": (Dv,), "state": (B, Hv, Dv, Dk)
    }  # fmt: skip
    made = {
        name: mx.array(3 * normal(rng, *shape) if name in "ab" else normal(rng, *shape))
        for name, shape in (half | full).items()
    }
    return {name: x.astype(dtype) if name in half else x for name, x in made.items()}


def delta_mixer(
    qkv, a, b, z, conv_weight, A_log, dt_bias, norm_weight, window, state, key_heads, value_heads, key_dim, value_dim,
    lower_bound=None, beta_scale=1.0, output_gate="silu", eps=1e-6,
):  # fmt: skip
    """Outputs, and the windows and states after every token."""
    qkv, a, b, z, conv_weight, A_log, dt_bias, norm_weight, window, S = map(
        as64, (qkv, a, b, z, conv_weight, A_log, dt_bias, norm_weight, window, state)
    )
    B, T, _ = qkv.shape
    K, Hk, Hv, Dk, Dv = conv_weight.shape[1], key_heads, value_heads, key_dim, value_dim
    past = np.concatenate([window, qkv], 1)
    outputs, windows, states = [], [], []
    for t in range(T):
        mixed = silu((past[:, t : t + K] * conv_weight.T).sum(1))
        q, k, v = np.split(mixed, [Hk * Dk, 2 * Hk * Dk], axis=-1)
        q, k = (np.repeat(x.reshape(B, Hk, Dk), Hv // Hk, axis=1) for x in (q, k))
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
        decay = np.ones((B, Hv, 1))
        if a is not None:
            rate, shifted = np.exp(A_log)[:, None], (a[:, t] + dt_bias).reshape(B, Hv, -1)
            plain = lower_bound is None
            decay = np.exp(-rate * np.logaddexp(shifted, 0) if plain else lower_bound * sigmoid(rate * shifted))
        S = S * decay[:, :, None, :]
        write = beta_scale * sigmoid(b[:, t])[..., None] * (v.reshape(B, Hv, Dv) - (S * k[:, :, None]).sum(-1))
        S = S + write[..., None] * k[:, :, None, :]
        opened = 1
        if z is not None:
            opened = (sigmoid if output_gate == "sigmoid" else silu)(z[:, t].reshape(B, Hv, Dv))
        o = rms((S * q[:, :, None]).sum(-1) * Dk**-0.5, eps) * norm_weight * opened
        outputs.append(o.reshape(B, -1))
        windows.append(past[:, t + 1 : t + K])
        states.append(S)
    return tuple(np.stack(x, 1) for x in (outputs, windows, states))


def check_delta_mixer(
    B, T, Hk, Hv, Dk, Dv, K=4, vector=False, dtype=mx.float32, lengths=None, snapshots=False, slow=False, without=(),
    seed=0, **options,
):  # fmt: skip
    """``slow``: decays near 1 from steps near 0, where a careless softplus loses its digits. ``without``: inputs that are None."""
    given = delta_mixer_arrays(B, T, Hk, Hv, Dk, Dv, K, vector, dtype, seed)
    if slow:
        given |= {"A_log": mx.full((Hv,), 10.0), "dt_bias": given["dt_bias"] - 20.0}
    given |= dict.fromkeys(without)
    sizes = {"key_heads": Hk, "value_heads": Hv, "key_dim": Dk, "value_dim": Dv}
    want, windows, states = delta_mixer(**given, **sizes, **options)
    y, window, state = ops.delta_mixer(
        **given, **sizes, **options, snapshots=snapshots, lengths=None if lengths is None else mx.array(lengths)
    )
    assert (y.dtype, window.dtype, state.dtype) == (dtype, dtype, mx.float32)
    assert np.isfinite(as64(y)).all()
    loss = 10 * LOSS[mx.float32] if dtype == mx.float32 else LOSS[dtype]  # the norm divides by a small o at times
    for r, n in enumerate(lengths or [T] * B):
        close(y[r, :n], want[r, :n], loss, "y")
        for t in range(T) if snapshots else [T - 1]:
            got = (window[r, t], state[r, t]) if snapshots else (window[r], state[r])
            last = min(t, n - 1)
            kept = (
                (as64(given["window"][r]), as64(given["state"][r])) if last < 0 else (windows[r, last], states[r, last])
            )
            assert_close(as64(got[0]), kept[0], 0, "window")
            close(got[1], kept[1], loss, "state")
    return y, window, state
