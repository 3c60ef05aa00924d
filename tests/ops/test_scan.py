"""The diagonal and the selective scan against their formulas in NumPy float64."""

import mlx.core as mx
import numpy as np
import pytest
from helpers import assert_close

from mlx_linattn import ops
from mlx_linattn.errors import ShapeError


def diagonal_arrays(rng, B, T, W):
    decay = rng.uniform(0, 1, (B, T, W))
    decay[:, ::7], decay[:, 1::7], decay[:, 2::7], decay[:, 3::7] = 0, 1e-30, 1, 0.9999
    return [x.astype(np.float32) for x in (decay, rng.normal(size=(B, T, W)), rng.normal(size=(B, W)))]


def diagonal_float64(decay, update, state):
    decay, update, h = (x.astype(np.float64) for x in (decay, update, state))
    outputs = []
    for t in range(update.shape[1]):
        h = decay[:, t] * h + update[:, t]
        outputs.append(h)
    return np.stack(outputs, 1), h


def selective_arrays(rng, B, T, inner, N):
    A = -np.exp(rng.uniform(-3, 3, (inner, N)))
    delta = np.log1p(np.exp(rng.normal(-1, 3, (B, T, inner))))  # steps from almost nothing to a full reset
    shapes = {"x": (B, T, inner), "B": (B, T, N), "C": (B, T, N), "D": (inner,), "state": (B, inner, N)}
    arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()} | {"A": A, "delta": delta}
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def selective_float64(x, delta, A, B, C, D, state):
    x, delta, A, B, C, D, h = (array.astype(np.float64) for array in (x, delta, A, B, C, D, state))
    outputs = []
    for t in range(x.shape[1]):
        h = np.exp(delta[:, t, :, None] * A) * h + (delta[:, t] * x[:, t])[..., None] * B[:, t, None, :]
        outputs.append((h * C[:, t, None, :]).sum(-1) + D * x[:, t])
    return np.stack(outputs, 1), h


def as_mlx(arrays):
    return {name: mx.array(array) for name, array in arrays.items()}


@pytest.mark.parametrize("backend", ["reference", "mlx"])
@pytest.mark.parametrize("B, T, W", [(1, 1, 5), (2, 7, 3), (1, 8, 33), (2, 37, 20), (1, 129, 8), (1, 1000, 4)])
def test_diagonal_scan_is_its_formula(backend, B, T, W):
    decay, update, state = diagonal_arrays(np.random.default_rng(T), B, T, W)
    want, last = diagonal_float64(decay, update, state)
    with ops.use_backend(backend):
        h, new = ops.diagonal_scan(mx.array(decay), mx.array(update), mx.array(state))
    assert_close(h, want, 1e-5)
    assert_close(new, last, 1e-5)


@pytest.mark.parametrize("backend", ["reference", "mlx"])
@pytest.mark.parametrize(
    "B, T, inner, N", [(1, 1, 5, 16), (2, 7, 3, 4), (1, 8, 33, 16), (2, 37, 20, 8), (1, 130, 8, 1)]
)
def test_selective_scan_is_its_formula(backend, B, T, inner, N):
    arrays = selective_arrays(np.random.default_rng(T), B, T, inner, N)
    want, last = selective_float64(**arrays)
    with ops.use_backend(backend):
        y, new = ops.selective_scan(**as_mlx(arrays))
    scale = max(1, abs(want).max())
    assert_close(y, want, 5e-6 * scale)
    assert_close(new, last, 5e-6 * scale)


def test_selective_scan_in_many_groups_is_the_whole(monkeypatch):
    monkeypatch.setattr("mlx_linattn.ops.scan.GROUP", 0)  # eight tokens a group
    test_selective_scan_is_its_formula("mlx", 2, 37, 20, 8)


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_scan_cut_anywhere_is_the_whole(cut):
    rng = np.random.default_rng(cut)
    decay, update, state = map(mx.array, diagonal_arrays(rng, 2, 12, 6))
    whole, last = ops.diagonal_scan(decay, update, state)
    first, middle = ops.diagonal_scan(decay[:, :cut], update[:, :cut], state)
    second, end = ops.diagonal_scan(decay[:, cut:], update[:, cut:], middle)
    assert_close(mx.concatenate([first, second], axis=1), whole, 1e-6)
    assert_close(end, last, 1e-6)

    arrays = as_mlx(selective_arrays(rng, 2, 12, 6, 4))
    tokens = ("x", "delta", "B", "C")
    whole, last = ops.selective_scan(**arrays)
    first, middle = ops.selective_scan(**arrays | {name: arrays[name][:, :cut] for name in tokens})
    second, end = ops.selective_scan(**arrays | {name: arrays[name][:, cut:] for name in tokens} | {"state": middle})
    assert_close(mx.concatenate([first, second], axis=1), whole, 1e-5)
    assert_close(end, last, 1e-5)


def test_padded_tokens_change_no_state():
    rng = np.random.default_rng(0)
    lengths = [13, 1, 0]
    decay, update, state = map(mx.array, diagonal_arrays(rng, 3, 13, 6))
    arrays = as_mlx(selective_arrays(rng, 3, 13, 6, 4))
    h, last = ops.diagonal_scan(decay, update, state, lengths=mx.array(lengths))
    y, matrix = ops.selective_scan(**arrays, lengths=mx.array(lengths))
    for r, n in enumerate(lengths):
        row = slice(r, r + 1)
        if n == 0:
            assert_close(last[row], state[row], 0)
            assert_close(matrix[row], arrays["state"][row], 0)
            continue
        alone, end = ops.diagonal_scan(decay[row, :n], update[row, :n], state[row])
        assert_close(h[row, :n], alone, 1e-6)
        assert_close(last[row], end, 1e-6)
        one = {name: x if name in "AD" else x[row] if name == "state" else x[row, :n] for name, x in arrays.items()}
        alone, end = ops.selective_scan(**one)
        assert_close(y[row, :n], alone, 1e-5)
        assert_close(matrix[row], end, 1e-5)


def test_a_scan_forgets_nothing_in_bfloat16():
    decay = mx.full((1, 1000, 4), 0.9999)
    h, state = ops.diagonal_scan(decay, mx.zeros((1, 1000, 4), mx.bfloat16), mx.ones((1, 4)))
    assert h.dtype == mx.bfloat16
    assert state.dtype == mx.float32
    assert_close(state, np.full((1, 4), np.float64(np.float32(0.9999)) ** 1000), 1e-5)
    arrays = as_mlx(selective_arrays(np.random.default_rng(0), 1, 20, 6, 4))
    half = arrays | {name: arrays[name].astype(mx.bfloat16) for name in ("x", "B", "C")}
    y, state = ops.selective_scan(**half)
    want, _ = ops.selective_scan(**half | {"x": half["x"].astype(mx.float32)})
    assert y.dtype == mx.bfloat16
    assert state.dtype == mx.float32
    assert_close(y.astype(mx.float32), want, 0.01 * float(mx.abs(want).max()))


def test_a_scan_names_the_array_that_does_not_fit():
    with pytest.raises(ShapeError, match=r"diagonal_scan: decay has shape \(1, 2, 3\), expected \(1, 2, 4\)"):
        ops.diagonal_scan(mx.ones((1, 2, 3)), mx.ones((1, 2, 4)))
    arrays = as_mlx(selective_arrays(np.random.default_rng(0), 1, 2, 6, 4))
    with pytest.raises(ShapeError, match=r"selective_scan: B has shape \(1, 2, 5\), expected \(1, 2, 4\)"):
        ops.selective_scan(**arrays | {"B": mx.ones((1, 2, 5))})
