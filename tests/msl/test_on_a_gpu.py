"""The kernels on the GPU of this machine against float64: real concurrency, where the emulator has only orders."""

import mlx.core as mx
import pytest

from mlx_linattn import ops
from mlx_linattn.ops import dispatch
from msl.problems import Problem
from msl.test_recurrence import PROBLEMS

DEVICE = "metal" if mx.metal.is_available() else "cuda" if mx.cuda.is_available() else None
pytestmark = pytest.mark.skipif(DEVICE is None, reason="needs an Apple or NVIDIA GPU")

LONG = {
    "long": Problem(T=1000, Hk=2, Hv=6, Dk=128, Dv=64),
    "long-vector": Problem(T=1000, Hk=2, Hv=6, Dk=128, Dv=64, gate="vector"),
    "long-bf16": Problem(T=1000, Hk=2, Hv=6, Dk=128, Dv=64, keys=mx.bfloat16, B=2, lengths=(1000, 517)),
}
#: The tensor-core kernels multiply numbers of 16 bits of mantissa.
ROOM = {"tensor_core": 20.0}


@pytest.mark.parametrize("path", dict.fromkeys(r.path for r in dispatch.TABLE if r.op == "recurrence" and DEVICE in r.devices and r.devices != dispatch.ANY))  # fmt: skip
@pytest.mark.parametrize("name", [*PROBLEMS, *LONG])
def test_equals_float64(name, path):
    problem = (PROBLEMS | LONG)[name]
    call = dispatch.Call("recurrence", problem.T, 1, problem.Dk, problem.Dv, problem.gate, problem.delta)
    with ops.use_backend(DEVICE, path), mx.stream(mx.gpu):
        if dispatch.choose(call).path != path:
            pytest.skip("the kernel refuses this shape")
        worst = problem.differences(problem.run())
    assert all(error <= allowed * ROOM.get(path, 1.0) for error, allowed in zip(worst, problem.within)), worst
