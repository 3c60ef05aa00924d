"""The causal short convolution: plain MLX and reference against NumPy float64; windows, splits and padding."""

import mlx.core as mx
import numpy as np
import pytest
from helpers import assert_close
from hypothesis import given
from hypothesis import strategies as st

from mlx_linattn import ops
from mlx_linattn.errors import ShapeError


def exact(x, weight, bias, window, silu):
    K = weight.shape[1]
    past = np.concatenate([window, x], axis=1).astype(np.float64)
    y = sum(past[:, i : i + x.shape[1]] * weight[:, i].astype(np.float64) for i in range(K))
    y = y if bias is None else y + bias
    return y / (1 + np.exp(-y)) if silu else y


@st.composite
def cases(draw):
    B, T, C, K = (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 12)),
        draw(st.sampled_from([1, 6])),
        draw(st.integers(2, 5)),
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x, weight, window = rng.normal(size=(B, T, C)), rng.normal(size=(C, K)), rng.normal(size=(B, K - 1, C))
    bias = rng.normal(size=C) if draw(st.booleans()) else None
    arrays = [a if a is None else a.astype(np.float32) for a in (x, weight, bias, window)]
    return arrays, draw(st.booleans())


def run(x, weight, bias, window, silu, lengths=None, backend="mlx"):
    arrays = [a if a is None else mx.array(a) for a in (x, weight, bias, window)]
    with ops.use_backend(backend):
        return ops.short_conv(*arrays, silu=silu, lengths=None if lengths is None else mx.array(lengths))


@pytest.mark.parametrize("backend", ["reference", "mlx"])
@given(case=cases())
def test_equals_the_formula_in_float64(backend, case):
    (x, weight, bias, window), silu = case
    y, new = run(x, weight, bias, window, silu, backend=backend)
    assert_close(y, exact(x, weight, bias, window, silu), 1e-5, "y")
    K = weight.shape[1]
    assert_close(new, np.concatenate([window, x], axis=1)[:, -(K - 1) :], 0.0, "window")


@given(case=cases(), data=st.data())
def test_split_anywhere_equals_whole(case, data):
    (x, weight, bias, window), silu = case
    cut = data.draw(st.integers(0, x.shape[1] - 1), label="cut")
    whole, last = run(x, weight, bias, window, silu)
    pieces, carried = [], window
    for part in (x[:, :cut], x[:, cut:]):
        if part.shape[1]:
            y, carried = run(part, weight, bias, carried, silu)
            pieces.append(y)
    assert_close(mx.concatenate(pieces, axis=1), whole, 1e-6, "y")
    assert_close(carried, last, 0.0, "window")


@given(case=cases(), data=st.data())
def test_padding_never_enters_a_rows_window(case, data):
    (x, weight, bias, window), silu = case
    B, T, _ = x.shape
    lengths = [data.draw(st.integers(0, T), label="length") for _ in range(B)]
    y, new = run(x, weight, bias, window, silu, lengths=lengths)
    for b, length in enumerate(lengths):
        real = np.concatenate([window[b], x[b, :length]])
        assert_close(new[b], real[len(real) - len(window[b]) :], 0.0, "window")
        assert_close(y[b, :length], exact(x[b : b + 1, :length], weight, bias, window[b : b + 1], silu)[0], 1e-5, "y")


def test_a_missing_window_is_zeros():
    x, weight = mx.random.normal((1, 5, 3), key=mx.random.key(0)), mx.random.normal((3, 4), key=mx.random.key(1))
    with_none, window = ops.short_conv(x, weight)
    with_zeros, _ = ops.short_conv(x, weight, window=mx.zeros((1, 3, 3)))
    assert_close(with_none, with_zeros, 0.0)
    assert window.dtype == x.dtype


def test_bfloat16_sums_in_float32():
    """Products that cancel: a bfloat16 sum would lose the small term."""
    x = mx.array([[[256.0], [1.0], [-256.0]]], dtype=mx.bfloat16)
    y, _ = ops.short_conv(x, mx.ones((1, 3)), silu=False)
    assert y.dtype == mx.bfloat16 and y[0, -1, 0].item() == 1.0


@pytest.mark.parametrize(("weight", "window"), [((4, 4), (1, 3, 3)), ((3, 4), (1, 4, 3)), ((3, 4), (2, 3, 3))])
def test_shapes_that_do_not_fit_are_named(weight, window):
    with pytest.raises(ShapeError, match="short_conv: "):
        ops.short_conv(mx.zeros((1, 5, 3)), mx.zeros(weight), window=mx.zeros(window))
