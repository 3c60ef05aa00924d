"""The gated norms against NumPy float64."""

import mlx.core as mx
import numpy as np
import pytest
from helpers import assert_close

from mlx_linattn import ops


def silu(x):
    return x / (1 + np.exp(-x))


def rms(x, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


@pytest.mark.parametrize("activation, opened", [("silu", silu), ("sigmoid", lambda x: 1 / (1 + np.exp(-x)))])
def test_norm_then_gate_is_its_formula(activation, opened):
    rng = np.random.default_rng(0)
    x, gate, weight = rng.normal(size=(2, 3, 5, 40)), 3 * rng.normal(size=(2, 3, 5, 40)), rng.normal(size=40)
    got = ops.norm_then_gate(*(mx.array(a.astype(np.float32)) for a in (x, weight, gate)), 1e-5, activation)
    assert_close(got, rms(x, 1e-5) * weight * opened(gate), 3e-6)


@pytest.mark.parametrize("groups", [1, 4])
def test_gate_then_norm_takes_its_mean_over_each_group(groups):
    rng = np.random.default_rng(0)
    x, gate, weight = rng.normal(size=(2, 3, 40)), 3 * rng.normal(size=(2, 3, 40)), rng.normal(size=40)
    got = ops.gate_then_norm(*(mx.array(a.astype(np.float32)) for a in (x, weight, gate)), 1e-5, groups)
    opened = (x * silu(gate)).reshape(2, 3, groups, -1)
    assert_close(got, rms(opened, 1e-5).reshape(x.shape) * weight, 3e-6)
    assert got.dtype == mx.float32


def test_gated_norms_keep_their_dtype_and_compute_in_float32():
    x = mx.full((1, 1, 64), 300.0, mx.float16)  # its square overflows float16
    for got in (ops.norm_then_gate(x, mx.ones(64), x, 1e-6, "sigmoid"), ops.gate_then_norm(x, mx.ones(64), x, 1e-6)):
        assert got.dtype == mx.float16
        assert_close(got, np.ones((1, 1, 64)), 1e-3)
