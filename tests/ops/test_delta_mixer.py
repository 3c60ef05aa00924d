"""The fused gated-delta mixer: every backend against its formula in NumPy float64."""

import mlx.core as mx
import numpy as np
import pytest
from helpers import assert_close

from mlx_linattn import ops


def arrays(rng, B, T, Hk, Hv, Dk, Dv, K=4, vector=False):
    C, gates = 2 * Hk * Dk + Hv * Dv, Hv * Dk if vector else Hv
    made = {
        "qkv": rng.normal(size=(B, T, C)), "a": 3 * rng.normal(size=(B, T, gates)), "b": rng.normal(size=(B, T, Hv)),
        "z": rng.normal(size=(B, T, Hv * Dv)), "conv_weight": rng.normal(size=(C, K)), "A_log": rng.normal(size=Hv),
        "dt_bias": rng.normal(size=gates), "norm_weight": rng.normal(size=Dv), "window": rng.normal(size=(B, K - 1, C)),
        "state": rng.normal(size=(B, Hv, Dv, Dk)),
    }  # fmt: skip
    return {name: x.astype(np.float32) for name, x in made.items()}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def float64(
    qkv, a, b, z, conv_weight, A_log, dt_bias, norm_weight, window, state, key_heads, value_heads, key_dim, value_dim,
    lower_bound=None, beta_scale=1.0, output_gate="silu", eps=1e-6,
):  # fmt: skip
    """Outputs, and the windows and states after every token."""
    qkv, a, b, z, conv_weight, A_log, dt_bias, norm_weight, window, S = (
        np.array(x, np.float64) for x in (qkv, a, b, z, conv_weight, A_log, dt_bias, norm_weight, window, state)
    )
    B, T, _ = qkv.shape
    K, Hk, Hv, Dk, Dv = conv_weight.shape[1], key_heads, value_heads, key_dim, value_dim
    past = np.concatenate([window, qkv], 1)
    outputs, windows, states = [], [], []
    for t in range(T):
        mixed = (past[:, t : t + K] * conv_weight.T).sum(1)
        mixed = mixed * sigmoid(mixed)
        q, k, v = np.split(mixed, [Hk * Dk, 2 * Hk * Dk], axis=-1)
        q, k = (np.repeat(x.reshape(B, Hk, Dk), Hv // Hk, axis=1) for x in (q, k))
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
        rate, shifted = np.exp(A_log)[:, None], (a[:, t] + dt_bias).reshape(B, Hv, -1)
        plain = lower_bound is None
        decay = np.exp(-rate * np.logaddexp(shifted, 0) if plain else lower_bound * sigmoid(rate * shifted))
        S = S * decay[:, :, None, :]
        write = beta_scale * sigmoid(b[:, t])[..., None] * (v.reshape(B, Hv, Dv) - (S * k[:, :, None]).sum(-1))
        S = S + write[..., None] * k[:, :, None, :]
        o = (S * q[:, :, None]).sum(-1) * Dk**-0.5
        gate = z[:, t].reshape(B, Hv, Dv)
        opened = sigmoid(gate) * (1 if output_gate == "sigmoid" else gate)
        o = o / np.sqrt((o * o).mean(-1, keepdims=True) + eps) * norm_weight * opened
        outputs.append(o.reshape(B, -1))
        windows.append(past[:, t + 1 : t + K])
        states.append(S)
    return tuple(np.stack(x, 1) for x in (outputs, windows, states))


def check(shape, backend="mlx", dtype=mx.float32, within=2e-5, lengths=None, snapshots=False, seed=0, **options):
    B, T, Hk, Hv, Dk, Dv = shape
    vector, K = options.pop("vector", False), options.pop("K", 4)
    made = arrays(np.random.default_rng(seed), *shape, K=K, vector=vector)
    sizes = {"key_heads": Hk, "value_heads": Hv, "key_dim": Dk, "value_dim": Dv}
    half = {n: mx.array(x).astype(dtype) for n, x in made.items() if n in ("qkv", "a", "b", "z", "window")}
    given = {n: mx.array(x) for n, x in made.items()} | half
    same = {n: np.array(x.astype(mx.float32)) for n, x in given.items()}
    want, windows, states = float64(**same, **sizes, **options)
    with ops.use_backend(backend):
        y, window, state = ops.delta_mixer(
            **given, **sizes, **options, snapshots=snapshots, lengths=None if lengths is None else mx.array(lengths)
        )
    assert y.dtype == dtype
    assert state.dtype == mx.float32
    scale = max(1, abs(states).max())
    for r in range(B):
        n = T if lengths is None else lengths[r]
        assert_close(y[r, :n].astype(mx.float32), want[r, :n], within * max(1, abs(want).max()), "y")
        for t in range(T) if snapshots else [T - 1]:
            got = (window[r, t], state[r, t]) if snapshots else (window[r], state[r])
            last = min(t, n - 1)
            kept = (same["window"][r], same["state"][r]) if last < 0 else (windows[r, last], states[r, last])
            assert_close(got[0].astype(mx.float32), kept[0], 0, "window")
            assert_close(got[1], kept[1], within * scale, "state")
    return y, window, state


SHAPES = [(1, 1, 2, 4, 32, 32), (2, 3, 1, 4, 64, 32), (1, 8, 2, 2, 32, 96), (1, 5, 1, 3, 128, 128)]


@pytest.mark.parametrize("backend", ["reference", "mlx"])
@pytest.mark.parametrize("shape", [*SHAPES, (1, 37, 2, 4, 24, 40)])
@pytest.mark.parametrize("vector", [False, True])
def test_delta_mixer_is_its_formula(backend, shape, vector):
    check(shape, backend, vector=vector)


def test_delta_mixer_knows_every_published_gate():
    for vector in (False, True):
        check((1, 5, 1, 2, 32, 32), lower_bound=-5.0, beta_scale=2.0, output_gate="sigmoid", eps=1e-5, vector=vector)


@pytest.mark.parametrize("snapshots", [False, True])
def test_padded_tokens_change_neither_window_nor_state(snapshots):
    check((4, 5, 1, 2, 32, 32), lengths=[5, 3, 1, 0], snapshots=snapshots)


def test_snapshots_are_the_state_after_every_token():
    check((2, 4, 1, 2, 32, 32), snapshots=True)
