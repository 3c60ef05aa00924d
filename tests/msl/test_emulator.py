"""The emulator sees what it promises to see, and computes what Metal's specification says."""

import mlx.core as mx
import numpy as np
import pytest

from msl import emulator
from msl.emulator import ORDERS, MetalKernelCPU

pytestmark = pytest.mark.skipif(bool(emulator.MISSING), reason=str(emulator.MISSING))

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


def run(body, x, threads=64, order=0, seed=0, size=None):
    """One threadgroup over ``x``; the kernel sees x, y, i (its index) and lane."""
    start = "uint i = thread_position_in_grid.x; uint lane = thread_index_in_simdgroup; (void)lane; "
    kernel = MetalKernelCPU("probe", ["x"], ["y"], start + body)
    (y,) = kernel(
        inputs=[x], output_shapes=[(size or threads,)], output_dtypes=[mx.float32], grid=(threads, 1, 1),
        threadgroup=(threads, 1, 1), template=[("N", threads)], order=order, seed=seed,
    )  # fmt: skip
    return np.array(y)


X = mx.arange(64).astype(mx.float32)

BROKEN = {
    "a write past the end": ("y[i + 8] = x[i];", "write outside output y"),
    "a write before the start": ("y[int(i) - 8] = x[i];", "write outside output y"),
    "a write to an input": ("y[i] = x[i]; ((device float*)x)[i] = 0;", "input x was written"),
    "too much threadgroup memory": ("threadgroup float t[9000];\nt[i] = x[i]; y[i] = t[i];", "32 KB"),
    "a barrier in one branch": (f"if (i < 32) {{ {BARRIER} }}\nsimdgroup_barrier(mem_flags::mem_none); y[i] = x[i];", "divergent|deadlock"),
    "two different barriers": (f"if (i < 32) {{ {BARRIER}\n }} else {{\n {BARRIER} }} y[i] = x[i];", "divergent"),
    "a SIMD sum in one branch": ("float s = 0; if (lane < 16) s = simd_sum(x[i]);\nelse s = simd_max(x[i]); y[i] = s;", "divergent"),
    "a matrix without all lanes": (
        "if (lane < 8) { simdgroup_matrix<float, 8, 8> a(1.0f), b(1.0f); simdgroup_multiply(a, a, b); } y[i] = x[i];",
        "inactive lanes|deadlock",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [n for n, (_, message) in BROKEN.items() if message])
def test_a_broken_kernel_is_refused(name):
    body, message = BROKEN[name]
    with pytest.raises(RuntimeError, match=message):
        run(body, X)


def test_what_is_not_written_is_nan():
    y = run("if (i != 5) y[i] = x[i];", X)
    assert np.isnan(y[5]) and np.isfinite(np.delete(y, 5)).all()
    y = run(f"threadgroup float t[N];\nif (i != 5) t[i] = x[i]; {BARRIER} y[i] = t[i];", X)
    assert np.isnan(y[5]) and np.isfinite(np.delete(y, 5)).all()


def test_a_missing_barrier_shows_in_some_order():
    body = f"threadgroup float t[N];\nt[i] = x[i]; {BARRIER} y[i] = t[(i + 40) % N];"
    want = np.roll(np.array(X), -40)
    for order, seed in ORDERS:
        assert (run(body, X, order=order, seed=seed) == want).all()
    racy = [run(body.replace(BARRIER, ""), X, order=order, seed=seed) for order, seed in ORDERS]
    assert not all((y == want).all() for y in racy)


@pytest.mark.parametrize(
    "expression, want",
    [
        ("simd_sum(x[i])", lambda x: np.full(32, x.sum())),
        ("simd_max(x[i])", lambda x: np.full(32, x.max())),
        ("simd_shuffle_xor(x[i], 3)", lambda x: x[np.arange(32) ^ 3]),
        ("simd_broadcast(x[i], 7)", lambda x: np.full(32, x[7])),
        ("simd_prefix_inclusive_sum(x[i])", lambda x: np.cumsum(x)),
        ("simd_shuffle_down(x[i], 1)", lambda x: np.append(x[1:], np.nan)),
        ("float(bfloat(x[i] + 0.001953125f))", lambda x: np.where(x < 1, x + 0.001953125, x)),
    ],
)
def test_simd_functions(expression, want):
    y = run(f"y[i] = {expression};", X[:32], threads=32)
    np.testing.assert_array_equal(y, want(np.arange(32, dtype=np.float32)).astype(np.float32))


def test_a_matrix_product_of_mixed_types_is_the_product():
    a = np.random.default_rng(0).standard_normal(128).astype(np.float32)
    body = (
        "simdgroup_matrix<float, 8, 8> a, b; simdgroup_matrix<float, 8, 8> c = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);"
        "simdgroup_load(a, x, 8); simdgroup_load(b, x + 64, 8, ulong2(0, 0), true);"
        "simdgroup_multiply_accumulate(c, a, b, c); simdgroup_store(c, y, 8);"
    )
    y = run(body, mx.array(a), threads=32, size=64)
    np.testing.assert_allclose(y.reshape(8, 8), a[:64].reshape(8, 8) @ a[64:].reshape(8, 8).T + 1, rtol=1e-5)


def test_the_source_is_the_one_that_mlx_writes():
    kernel = MetalKernelCPU("named", ["x", "few"], ["y"], "y[thread_position_in_grid.x] = x[0] + few[0] + T(N);")
    source = kernel.metal_source(
        inputs=[X, mx.zeros(3)], template=[("T", mx.float16), ("N", 4)], output_shapes=[(32,)],
        output_dtypes=[mx.float32], grid=(32, 1, 1), threadgroup=(32, 1, 1),
    )  # fmt: skip
    assert "template <typename T, int N>" in source and "const device float* x [[buffer(0)]]" in source
    assert "const constant float* few [[buffer(1)]]" in source  # an array of fewer than 8 elements
