"""Norms against NumPy float64, at sizes and scales where a careless formula overflows or divides by zero."""

import mlx.core as mx
import numpy as np
import pytest
from helpers import assert_close

from mlx_linattn import ops

RNG = np.random.default_rng(0)


def exact_rms(x, weight, eps):
    x = np.array(x, np.float64)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


@pytest.mark.parametrize("size", [1, 3, 64, 257])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_rms_norm(size, scale):
    x, weight = (scale * RNG.normal(size=(2, 5, size))).astype(np.float32), RNG.normal(size=size).astype(np.float32)
    assert_close(ops.rms_norm(mx.array(x), mx.array(weight), 1e-6), exact_rms(x, weight, 1e-6), 2e-5)


def test_rms_norm_of_bfloat16_uses_the_float32_weight():
    """1 + 2^-10 rounds to 1 in bfloat16: only a float32 weight tells the two columns apart."""
    x = mx.full((1, 2), 256.0, dtype=mx.bfloat16)
    weight = mx.array([1.0, 1.5 + 2.0**-10])
    y = ops.rms_norm(x, weight, 0.0)
    assert y.dtype == mx.bfloat16
    assert_close(y.astype(mx.float32), [[1.0, 1.5]], 0.0)


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_norm_then_gate_norms_first(activation, dtype):
    x, gate = (mx.array(RNG.normal(size=(2, 3, 4, 16)), dtype=dtype) for _ in range(2))
    weight = RNG.normal(size=16).astype(np.float32)
    x64, gate64 = (np.array(a.astype(mx.float32), np.float64) for a in (x, gate))
    opened = 1 / (1 + np.exp(-gate64))
    opened = opened if activation == "sigmoid" else gate64 * opened
    got = ops.norm_then_gate(x, mx.array(weight), gate, 1e-5, activation)
    assert got.dtype == dtype
    assert_close(got.astype(mx.float32), exact_rms(x64, weight, 1e-5) * opened, 1e-5 if dtype == mx.float32 else 0.05)


@pytest.mark.parametrize("size", [1, 8, 96])
def test_l2_normalize_divides_by_the_sum_of_squares(size):
    x = RNG.normal(size=(2, 3, size)).astype(np.float32)
    want = x / np.sqrt((x.astype(np.float64) ** 2).sum(-1, keepdims=True) + 1e-6)
    assert_close(ops.l2_normalize(mx.array(x)), want, 2e-6)


def test_l2_normalize_of_zeros_is_zeros_and_float32():
    y = ops.l2_normalize(mx.zeros((1, 4), dtype=mx.bfloat16))
    assert y.dtype == mx.float32
    assert_close(y, np.zeros((1, 4)), 0.0)
