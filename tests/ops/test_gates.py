"""Decays and write strengths against NumPy float64, out to where exp, softplus and bfloat16 give up."""

import mlx.core as mx
import numpy as np
import pytest
from helpers import assert_close

from mlx_linattn import ops

FAR = np.array([-1e4, -100.0, -20.0, -1.0, 0.0, 1.0, 20.0, 100.0, 1e4], np.float32)


def exact_decay(a, A_log, dt_bias, lower_bound):
    a, rate = a.astype(np.float64) + dt_bias, np.exp(A_log.astype(np.float64))
    rate = rate[:, None] if a.ndim == 4 else rate
    if lower_bound is None:
        return np.exp(-rate * np.logaddexp(a, 0.0))
    with np.errstate(over="ignore"):
        return np.exp(lower_bound / (1 + np.exp(-rate * a)))


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("vector", [False, True])
def test_decay_is_the_formula_and_stays_between_0_and_1(vector, lower_bound):
    rng = np.random.default_rng(0)
    A_log = np.array([-9.0, 0.3, 4.0], np.float32)
    a = np.broadcast_to(FAR[None, :, None], (1, len(FAR), 3))
    if vector:
        a = np.broadcast_to(a[..., None], (*a.shape, 4))
    dt_bias = rng.normal(size=a.shape[2:]).astype(np.float32)
    got = ops.delta_decay(mx.array(a), mx.array(A_log), mx.array(dt_bias), lower_bound)
    assert got.dtype == mx.float32 and got.shape == a.shape
    assert_close(got, exact_decay(a, A_log, dt_bias, lower_bound), 1e-5)
    assert mx.all((got >= 0) & (got <= 1)).item()
    if lower_bound is not None:
        assert got.min().item() >= np.exp(lower_bound) * (1 - 1e-6)


def test_a_decay_near_one_survives_bfloat16_inputs():
    """exp(-1e-3) rounds to 1 in bfloat16, and a state that never decays grows over a long context."""
    a = mx.full((1, 1, 1), -6.907, dtype=mx.bfloat16)
    decay = ops.delta_decay(a, mx.zeros(1, dtype=mx.bfloat16), mx.zeros(1, dtype=mx.bfloat16))
    assert decay.dtype == mx.float32
    assert 0.998 < decay.item() < 0.9995


def test_gates_are_added_in_float32_whatever_their_dtype():
    a, dt_bias = mx.full((1, 1, 1), 4.0, dtype=mx.bfloat16), mx.full((1,), 2.0**-8, dtype=mx.bfloat16)
    decay = ops.delta_decay(a, mx.full((1,), -4.0, dtype=mx.bfloat16), dt_bias)
    assert_close(decay, [[[np.exp(-np.exp(-4.0) * np.logaddexp(4 + 2.0**-8, 0))]]], 1e-6)


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_write_strength_is_a_scaled_sigmoid_in_float32(scale):
    got = ops.write_strength(mx.array(FAR).astype(mx.bfloat16), scale)
    assert got.dtype == mx.float32
    rounded = np.array(mx.array(FAR).astype(mx.bfloat16).astype(mx.float32), np.float64)
    with np.errstate(over="ignore"):
        assert_close(got, scale / (1 + np.exp(-rounded)), 1e-6)
