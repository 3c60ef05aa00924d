"""The diagonal and the selective scan in plain MLX against their formulas in NumPy float64."""

import mlx.core as mx
import numpy as np
import pytest
from formulas import check_diagonal_scan, check_selective_scan, diagonal_arrays, selective_arrays
from helpers import assert_close

from mlx_linattn import ops
from mlx_linattn.errors import ShapeError


@pytest.mark.parametrize("backend", ["reference", "mlx"])
@pytest.mark.parametrize("B, T, W", [(1, 1, 5), (2, 7, 3), (1, 8, 33), (2, 37, 20), (1, 129, 8), (1, 1000, 4)])
def test_diagonal_scan_is_its_formula(backend, B, T, W):
    with ops.use_backend(backend):
        check_diagonal_scan(B, T, W)


@pytest.mark.parametrize("backend", ["reference", "mlx"])
@pytest.mark.parametrize(
    "B, T, inner, N", [(1, 1, 5, 16), (2, 7, 3, 4), (1, 8, 33, 16), (2, 37, 20, 8), (1, 130, 8, 1)]
)
@pytest.mark.parametrize("skip", [False, True])
def test_selective_scan_is_its_formula(backend, B, T, inner, N, skip):
    with ops.use_backend(backend):
        check_selective_scan(B, T, inner, N, skip=skip)


def test_selective_scan_in_many_groups_is_the_whole(monkeypatch):
    monkeypatch.setattr("mlx_linattn.ops.scan.GROUP", 0)  # eight tokens a group
    check_selective_scan(2, 37, 20, 8)


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_scan_cut_anywhere_is_the_whole(cut):
    for scan, arrays, tokens in (
        (ops.diagonal_scan, diagonal_arrays(2, 12, 6), ("decay", "update")),
        (ops.selective_scan, selective_arrays(2, 12, 6, 4), ("x", "delta", "B", "C")),
    ):
        whole, last = scan(**arrays)
        first, middle = scan(**arrays | {name: arrays[name][:, :cut] for name in tokens})
        second, end = scan(**arrays | {name: arrays[name][:, cut:] for name in tokens} | {"state": middle})
        within = 1e-6 * float(mx.abs(whole).max())
        assert_close(mx.concatenate([first, second], axis=1), whole, within)
        assert_close(end, last, within)


def test_padded_tokens_change_no_state():
    check_diagonal_scan(4, 13, 6, lengths=[13, 12, 1, 0])
    check_selective_scan(4, 13, 6, 4, lengths=[13, 12, 1, 0])


def test_scans_take_half_precision():
    for dtype in (mx.bfloat16, mx.float16):
        check_diagonal_scan(2, 20, 6, dtype=dtype)
        check_selective_scan(2, 20, 6, 4, dtype=dtype)


def test_a_scan_in_bfloat16_decays_in_float32():
    decay = mx.full((1, 1000, 4), 0.9999)
    _, state = ops.diagonal_scan(decay, mx.zeros((1, 1000, 4), mx.bfloat16), mx.ones((1, 4)))
    assert_close(state, np.full((1, 4), np.float64(np.float32(0.9999)) ** 1000), 1e-5)


def test_a_scan_names_the_array_that_does_not_fit():
    with pytest.raises(ShapeError, match=r"diagonal_scan: decay has shape \(1, 2, 3\), expected \(1, 2, 4\)"):
        ops.diagonal_scan(mx.ones((1, 2, 3)), mx.ones((1, 2, 4)))
    arrays = selective_arrays(1, 2, 6, 4)
    with pytest.raises(ShapeError, match=r"selective_scan: B has shape \(1, 2, 5\), expected \(1, 2, 4\)"):
        ops.selective_scan(**arrays | {"B": mx.ones((1, 2, 5))})
