"""The gated norms against NumPy float64."""

import mlx.core as mx
import numpy as np
import pytest
from formulas import check_gate_then_norm, check_norm_then_gate
from helpers import assert_close

from mlx_linattn import ops


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_norm_then_gate_is_its_formula(activation):
    check_norm_then_gate((2, 3, 5, 40), activation)


@pytest.mark.parametrize("groups", [1, 4])
def test_gate_then_norm_takes_its_mean_over_each_group(groups):
    check_gate_then_norm((2, 3, 40), groups)


def test_gated_norms_keep_their_dtype_and_compute_in_float32():
    x = mx.full((1, 1, 64), 300.0, mx.float16)  # its square overflows float16
    for got in (ops.norm_then_gate(x, mx.ones(64), x, 1e-6, "sigmoid"), ops.gate_then_norm(x, mx.ones(64), x, 1e-6)):
        assert got.dtype == mx.float16
        assert_close(got, np.ones((1, 1, 64)), 1e-3)
