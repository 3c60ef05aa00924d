"""The dispatch table: every call has a row, forcing works, and kernels are named once."""

import mlx.core as mx
import pytest

from mlx_linattn import metal, ops
from mlx_linattn.ops import dispatch
from mlx_linattn.ops.recurrence import PATHS

OPS = tuple(dict.fromkeys(row.op for row in dispatch.TABLE))


def call(op="recurrence", T=64, Dk=64, Dv=64, gate="scalar", taps=4):
    return dispatch.Call(op, T, 4, Dk, Dv, gate, True, mx.float32, taps)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("where", ("cpu", "metal", "cuda"))
def test_every_call_has_a_path(op, where, monkeypatch):
    monkeypatch.setattr(dispatch, "device", lambda: where)
    for T in (1, 2, 3, 5, 8, 9, 31, 32, 63, 64, 100_000):
        for gate in ("none", "scalar", "vector"):
            for D in (64, 24):
                assert dispatch.choose(call(op, T, D, D, gate))


def test_kernels_are_for_gpus_only(monkeypatch):
    for row in dispatch.TABLE:
        assert row.devices == dispatch.ANY or "cpu" not in row.devices
    monkeypatch.setattr(dispatch, "device", lambda: "cpu")
    assert dispatch.choose(call()).path == "chunked"


def test_forcing_a_backend_and_a_path():
    with ops.use_backend("reference"):
        assert dispatch.choose(call()).path == "reference"
    with ops.use_backend("mlx"):
        assert dispatch.choose(call()).path == "chunked"
    with ops.use_backend("metal"):
        assert dispatch.choose(call()).path == "simdgroup"
        assert dispatch.choose(call(T=8)).path == "packed"
        assert dispatch.choose(call(Dv=24)).path == "packed"  # right, though not the fastest at this length
        assert dispatch.choose(call(Dk=40)).path == "chunked"  # refused by every kernel
    with ops.use_backend("metal", "packed"):
        assert dispatch.choose(call(T=5000)).path == "packed"
    with ops.use_backend("cuda"):
        assert dispatch.choose(call()).path == "tensor_core"


def test_every_path_of_the_table_is_implemented():
    rows = [row for row in dispatch.TABLE if row.op == "recurrence"]
    assert {row.path for row in rows} <= set(PATHS)


@pytest.mark.parametrize("name", ("recurrence", "chunked", "tensor_core", "tensor_core_prepare"))
def test_a_source_is_short_and_names_its_buffers(name):
    source = metal.source(name)
    assert len(source.body) < 10_000, "MLX hashes the text at every call"
    assert "//" not in source.body and "k" in source.inputs and source.outputs


@pytest.mark.skipif(
    mx.__version__.startswith("0.31.") and not mx.metal.is_available(),
    reason="MLX 0.31 makes Metal kernels on a Mac alone",
)
def test_a_kernel_is_built_once():
    assert metal.kernel("recurrence", "metal") is metal.kernel("recurrence", "metal")
