"""Softmax attention against NumPy float64: tiled and direct paths, any S, rows that start at different positions."""

import importlib

import mlx.core as mx
import numpy as np
import pytest
from helpers import assert_close
from hypothesis import given
from hypothesis import strategies as st

from mlx_linattn import ops
from mlx_linattn.ops.columns import Columns

TILE = 8  # so that short caches have many tiles


@pytest.fixture(autouse=True, scope="module")
def small_tiles():
    module = importlib.import_module("mlx_linattn.ops.attention")
    before = module.TILE, module.DECODE_TILE
    module.TILE = module.DECODE_TILE = TILE
    yield
    module.TILE, module.DECODE_TILE = before


def exact(q, k, v, scale, starts):
    """Row by row and query by query, in float64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    B, H, T, _ = q.shape
    groups = H // k.shape[1]
    out = np.zeros((B, H, T, v.shape[-1]))
    for b in range(B):
        for t in range(T):
            seen = starts[b] + t + 1
            for h in range(H):
                scores = scale * k[b, h // groups, :seen] @ q[b, h, t]
                weights = np.exp(scores - scores.max())
                out[b, h, t] = weights / weights.sum() @ v[b, h // groups, :seen]
    return out


@st.composite
def cases(draw, widths=(4, 12)):
    B, T = draw(st.integers(1, 2)), draw(st.integers(1, 9))
    Hkv, groups = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    D, Dv = draw(st.sampled_from(widths)), draw(st.sampled_from(widths))
    starts = tuple(draw(st.integers(0, 30)) for _ in range(B))
    S = max(starts) + T + draw(st.sampled_from([0, 0, 3]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    spread = draw(st.sampled_from([1.0, 30.0]))  # scores up to hundreds: only a running maximum keeps exp finite
    q = (spread * rng.normal(size=(B, Hkv * groups, T, D))).astype(np.float32)
    k, v = (rng.normal(size=(B, Hkv, S, d)).astype(np.float32) for d in (D, Dv))
    return q, k, v, starts


def run(q, k, v, starts, backend=None, dtype=mx.float32):
    arrays = [mx.array(x).astype(dtype) for x in (q, k, v)]
    if backend is None:
        return ops.attention(*arrays, scale=q.shape[-1] ** -0.5, starts=starts)
    with ops.use_backend(backend):
        return ops.attention(*arrays, scale=q.shape[-1] ** -0.5, starts=starts)


@pytest.mark.parametrize("backend", ["reference", None])
@given(case=cases())
def test_equals_the_formula_in_float64(backend, case):
    q, k, v, starts = case
    assert_close(run(q, k, v, starts, backend), exact(q, k, v, q.shape[-1] ** -0.5, starts), 2e-5)


@given(case=cases(widths=[32, 64]), data=st.data())
def test_quantized_columns_are_those_that_they_stand_for(case, data):
    """Whatever part of them is quantized, for a few queries and for many."""
    q, k, v, starts = case
    split = data.draw(st.integers(0, k.shape[2]), "exact columns")

    def columns(x):
        packed = mx.quantize(mx.array(x[:, :, split:]), 32, 8) if split < x.shape[2] else ()
        return Columns(mx.array(x[:, :, :split]) if split else None, packed, 32, 8)

    keys, values = columns(k), columns(v)
    want = exact(q, np.array(keys.floats()), np.array(values.floats()), q.shape[-1] ** -0.5, starts)
    assert_close(ops.attention(mx.array(q), keys, values, scale=q.shape[-1] ** -0.5, starts=starts), want, 2e-5)


@given(case=cases())
def test_what_lies_after_a_query_does_not_matter(case):
    q, k, v, starts = case
    got = run(q, k, v, starts)
    for b, start in enumerate(starts):
        k[b, :, start + q.shape[2] :] = 1e3
        v[b, :, start + q.shape[2] :] = 1e3
    assert_close(run(q, k, v, starts), np.array(got), 1e-6)


@given(case=cases())
def test_bfloat16_is_rounded_once_at_the_end(case):
    q, k, v, starts = case
    q = q / np.abs(q).max()
    got = run(q, k, v, starts, dtype=mx.bfloat16)
    assert got.dtype == mx.bfloat16
    q, k, v = (np.array(mx.array(x).astype(mx.bfloat16).astype(mx.float32)) for x in (q, k, v))
    assert_close(got.astype(mx.float32), exact(q, k, v, q.shape[-1] ** -0.5, starts), 3e-2)
