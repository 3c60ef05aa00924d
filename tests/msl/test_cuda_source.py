"""The kernel bodies as CUDA: they compile, and no specialization keeps registers in memory. nvcc is enough, no GPU."""

from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest
from mlx_linattn import metal
from mlx_linattn.ops import use_backend

from msl import nvcc
from msl.problems import Problem

pytestmark = pytest.mark.skipif(nvcc.NVCC is None, reason="compiling the CUDA sources needs nvcc")

BF16 = mx.bfloat16


def recurrence_launches():
    for path in ("packed", "simdgroup"):
        for Dk in (64, 128, 256):
            for gate in ("scalar", "vector"):
                for keys in (mx.float32, BF16):
                    problem = Problem(T=2, Hk=1, Hv=2, Dk=Dk, Dv=128, gate=gate, keys=keys)
                    yield path, problem.run
        yield path, Problem(T=2, Dk=128, Dv=128, gate="scalar", keys=BF16, delta=False).run
        yield path, Problem(T=2, Dk=128, Dv=128, gate="vector", keys=BF16, delta=False).run


#: (path or None, function that launches) of every shipped specialization; another kernel's launches are added here.
LAUNCHES = [*recurrence_launches()]


def test_no_specialization_uses_stack_or_spills(monkeypatch):
    made: dict[str, str] = {}
    monkeypatch.setattr(metal, "kernel", lambda name, backend, _=0: nvcc.Recorder(name, metal.source(name), made))
    for path, launch in LAUNCHES:
        with use_backend("cuda", path):
            launch()
    with ThreadPoolExecutor(4) as pool:
        used = dict(zip(made, pool.map(nvcc.resources, made.values())))
    in_memory = {label: u for label, u in used.items() if u["stack"] or u["stores"]}
    assert used and not in_memory, in_memory
