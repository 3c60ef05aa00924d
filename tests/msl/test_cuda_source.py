"""The kernel bodies as CUDA: they compile, and no specialization keeps registers in memory. nvcc is enough, no GPU."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import mlx.core as mx
import pytest

from mlx_linattn import metal
from msl import nvcc
from msl.problems import Problem
from msl.step_problems import conv, diagonal, mixer, selective, then_gate, then_norm

pytestmark = pytest.mark.skipif(nvcc.NVCC is None, reason="compiling the CUDA sources needs nvcc")

BF16 = mx.bfloat16


def recurrence_launches():
    """The widest specializations, which need the most registers, and the published sizes in both decays and dtypes."""
    for path in ("packed", "simdgroup"):
        for gate in ("scalar", "vector"):
            yield path, Problem(T=2, Hv=2, Dk=256, Dv=128, gate=gate).run
            yield path, Problem(T=2, Hv=2, Dk=128, Dv=128, gate=gate, keys=BF16).run
        yield path, Problem(T=2, Hv=2, Dk=128, Dv=128, keys=BF16, delta=False).run
    for gate, keys in (("scalar", BF16), ("scalar", mx.float32), ("vector", BF16)):
        yield "tensor_core", Problem(T=2, Hv=2, Dk=128, Dv=128, gate=gate, keys=keys).run


def step_launches():
    """The widest specializations and the published sizes."""
    for T in (1, 2):
        for vector in (False, True):
            yield mixer(1, T, 1, 2, 128, 128, dtype=BF16, vector=vector)
            yield mixer(1, T, 1, 1, 256, 256, vector=vector)
    yield mixer(1, 2, 1, 2, 128, 128, dtype=BF16, snapshots=True)
    yield diagonal(1, 300, 32, dtype=BF16)
    yield selective(1, 40, 32, 64)
    yield selective(1, 40, 32, 16, dtype=BF16)
    yield conv(1, 9, 32, 8)
    yield then_gate((1, 1, 2, 128), dtype=BF16)
    yield then_norm((1, 1, 16384))


#: (path or None, function that launches); `python tests/msl/nvcc.py` compiles all that there are.
LAUNCHES = [*recurrence_launches(), *((None, check) for check in step_launches())]


def test_no_specialization_uses_stack_or_spills(monkeypatch):
    made = nvcc.sources(LAUNCHES, partial(monkeypatch.setattr, metal))
    with ThreadPoolExecutor(4) as pool:
        used = dict(zip(made, pool.map(nvcc.resources, made.values())))
    in_memory = {label: u for label, u in used.items() if u["stack"] or u["stores"]}
    assert used and not in_memory, in_memory
