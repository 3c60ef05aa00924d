"""Norms against NumPy float64, at sizes and scales where a careless formula overflows or divides by zero."""

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


@pytest.mark.parametrize("size", [1, 3, 64, 257])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_rms_norm(size, scale):
    x, weight = (
        (scale * np.random.default_rng(0).normal(size=(2, 5, size))).astype(np.float32),
        np.random.default_rng(0).normal(size=size).astype(np.float32),
    )
    assert_close(ops.rms_norm(mx.array(x), mx.array(weight), 1e-6), rms(x.astype(np.float64), 1e-6) * weight, 2e-5)


def test_rms_norm_of_bfloat16_uses_the_float32_weight():
    """1 + 2^-10 rounds to 1 in bfloat16: only a float32 weight tells the two columns apart."""
    x = mx.full((1, 2), 256.0, dtype=mx.bfloat16)
    weight = mx.array([1.0, 1.5 + 2.0**-10])
    y = ops.rms_norm(x, weight, 0.0)
    assert y.dtype == mx.bfloat16
    assert_close(y.astype(mx.float32), [[1.0, 1.5]], 0.0)


@pytest.mark.parametrize("size", [1, 8, 96])
def test_l2_normalize_divides_by_the_sum_of_squares(size):
    x = np.random.default_rng(0).normal(size=(2, 3, size)).astype(np.float32)
    want = x / np.sqrt((x.astype(np.float64) ** 2).sum(-1, keepdims=True) + 1e-6)
    assert_close(ops.l2_normalize(mx.array(x)), want, 2e-6)


def test_l2_normalize_of_zeros_is_zeros_and_float32():
    y = ops.l2_normalize(mx.zeros((1, 4), dtype=mx.bfloat16))
    assert y.dtype == mx.float32
    assert_close(y, np.zeros((1, 4)), 0.0)
