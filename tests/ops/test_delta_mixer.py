"""The fused middle of a gated-delta layer equals its parts, for scalar and vector gates, split and padded."""

import mlx.core as mx
import numpy as np
import pytest
from helpers import assert_close

from mlx_linattn import ops

Hk, Hv, Dk, Dv, K, B, T = 2, 4, 8, 6, 4, 2, 21
KINDS = {
    "gated delta": {},
    "beta to 2": {"beta_scale": 2.0},
    "vector gate": {"vector": True, "output_gate": "sigmoid"},
    "vector gate with a lower bound": {"vector": True, "lower_bound": -5.0, "output_gate": "sigmoid"},
}


def make(vector=False, **options):
    rng = np.random.default_rng(0)
    channels, gates = 2 * Hk * Dk + Hv * Dv, Hv * Dk if vector else Hv

    def normal(*shape):
        return mx.array(rng.normal(size=shape), dtype=mx.float32)

    tokens = {
        "qkv": normal(B, T, channels),
        "a": normal(B, T, gates),
        "b": normal(B, T, Hv),
        "z": normal(B, T, Hv * Dv),
    }
    rest = {
        "conv_weight": normal(channels, K), "A_log": normal(Hv), "dt_bias": normal(gates),
        "norm_weight": normal(Dv), "key_heads": Hk, "value_heads": Hv, "key_dim": Dk, "value_dim": Dv, **options,
    }  # fmt: skip
    return tokens, rest


def run(tokens, rest, window=None, state=None, first=0, last=None, lengths=None):
    parts = {name: x[:, first:last] for name, x in tokens.items()}
    lengths = None if lengths is None else mx.array(lengths)
    return ops.delta_mixer(**parts, **rest, window=window, state=state, lengths=lengths)


def by_hand(tokens, rest):
    """NumPy float64, token by token."""
    x = {name: np.array(value, np.float64) for name, value in tokens.items()}
    w = {name: np.array(value, np.float64) for name, value in rest.items() if isinstance(value, mx.array)}
    past = np.concatenate([np.zeros((B, K - 1, x["qkv"].shape[-1])), x["qkv"]], axis=1)
    qkv = sum(past[:, i : i + T] * w["conv_weight"][:, i] for i in range(K))
    qkv = qkv / (1 + np.exp(-qkv))
    q, k = (qkv[..., i * Hk * Dk : (i + 1) * Hk * Dk].reshape(B, T, Hk, Dk) for i in (0, 1))
    v = qkv[..., 2 * Hk * Dk :].reshape(B, T, Hv, Dv)
    q, k = (y / np.sqrt((y**2).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
    q, k = (np.repeat(y, Hv // Hk, axis=2) for y in (q * Dk**-0.5, k))
    a = (x["a"] + w["dt_bias"]).reshape(B, T, Hv, -1)
    rate = np.exp(w["A_log"])[:, None]
    bound = rest.get("lower_bound")
    decay = np.exp(-rate * np.logaddexp(a, 0)) if bound is None else np.exp(bound / (1 + np.exp(-rate * a)))
    beta = rest.get("beta_scale", 1.0) / (1 + np.exp(-x["b"]))
    S, out = np.zeros((B, Hv, Dk, Dv)), np.zeros((B, T, Hv, Dv))
    for t in range(T):
        S = S * decay[:, t][..., None]
        answer = np.einsum("bhkv,bhk->bhv", S, k[:, t])
        S = S + np.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t][..., None] * (v[:, t] - answer))
        out[:, t] = np.einsum("bhkv,bhk->bhv", S, q[:, t])
    z = x["z"].reshape(B, T, Hv, Dv)
    gate = 1 / (1 + np.exp(-z))
    gate = gate if rest.get("output_gate") == "sigmoid" else z * gate
    y = out / np.sqrt((out**2).mean(-1, keepdims=True) + 1e-6) * w["norm_weight"] * gate
    return y.reshape(B, T, -1), S.swapaxes(-1, -2)


@pytest.mark.parametrize("backend", ["reference", "mlx"])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_formula_in_float64(kind, backend):
    tokens, rest = make(**KINDS[kind])
    with ops.use_backend(backend):
        y, window, state = run(tokens, rest)
    want, want_state = by_hand(tokens, rest)
    assert_close(y, want, 1e-4, "y")
    assert_close(state, want_state, 1e-4, "state")
    assert_close(window, tokens["qkv"][:, -(K - 1) :], 0.0, "window")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [1, 2, 8, T - 1])
def test_split_equals_whole(kind, cut):
    tokens, rest = make(**KINDS[kind])
    whole = run(tokens, rest)
    left, window, state = run(tokens, rest, last=cut)
    right, window, state = run(tokens, rest, window, state, first=cut)
    for got, want in zip((mx.concatenate([left, right], axis=1), window, state), whole):
        assert_close(got, want, 1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [(T, 9), (2, T), (0, 5)])
def test_a_padded_row_is_the_row_alone(kind, lengths):
    tokens, rest = make(**KINDS[kind])
    y, window, state = run(tokens, rest, lengths=lengths)
    for b, length in enumerate(lengths):
        if not length:
            assert_close(state[b], np.zeros(state.shape[1:]), 0.0, "state of an empty row")
            continue
        alone = {name: x[b : b + 1] for name, x in tokens.items()}
        for got, want in zip((y[b, :length], window[b], state[b]), run(alone, rest, last=length)):
            assert_close(got, want[0], 1e-4)


def test_bfloat16_activations_keep_a_float32_state():
    tokens, rest = make()
    half = {name: x.astype(mx.bfloat16) for name, x in tokens.items()}
    y, window, state = run(half, rest)
    assert (y.dtype, window.dtype, state.dtype) == (mx.bfloat16, mx.bfloat16, mx.float32)
