"""The short convolution against NumPy float64."""

import mlx.core as mx
import pytest
from formulas import check_short_conv

from mlx_linattn import ops


@pytest.mark.parametrize("backend", ["reference", "mlx"])
@pytest.mark.parametrize("T, K", [(1, 4), (2, 4), (3, 4), (1, 2), (9, 3), (20, 4)])
def test_short_conv_is_its_formula(backend, T, K):
    with ops.use_backend(backend):
        check_short_conv(2, T, 5, K)
        check_short_conv(2, T, 5, K, bias=False, silu_after=False, dtype=mx.bfloat16)


@pytest.mark.parametrize("T", [1, 9])
def test_padded_inputs_never_enter_the_window(T):
    check_short_conv(4, T, 5, lengths=[T, T - 1, min(1, T), 0])
