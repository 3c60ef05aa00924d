"""The recurrence kernels on the emulator against the recurrence in float64."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlx_linattn import ops
from mlx_linattn.ops import dispatch, kernels
from msl import emulator
from msl.harness import compile_for, emulated, same_in_every_order
from msl.problems import Problem

pytestmark = pytest.mark.skipif(bool(emulator.MISSING), reason=str(emulator.MISSING))

BF16, F16 = mx.bfloat16, mx.float16
PATHS = ("packed", "simdgroup")
WIDE = Problem(T=20, Hk=2, Hv=4, Dk=128, Dv=64, B=2)
PROBLEMS = {
    "scalar": Problem(T=37, Hk=2, Hv=6, B=2),
    "vector": Problem(T=37, Hk=2, Hv=6, B=2, gate="vector"),
    "scalar-no-delta": Problem(T=75, Hk=2, Hv=6, delta=False),
    "vector-no-delta": Problem(T=75, Hk=2, Hv=6, gate="vector", delta=False),
    "none": Problem(T=19, gate="none"),
    "hard-gates": Problem(T=37, Hk=2, Hv=6, hard="gates"),
    "hard-gates-vector": Problem(T=37, Hk=2, Hv=6, gate="vector", hard="gates"),
    "hard-gates-no-delta": Problem(T=75, Hk=2, Hv=6, hard="gates", delta=False),
    "hard-gates-vector-no-delta": Problem(T=75, Hk=2, Hv=6, gate="vector", hard="gates", delta=False),
    "repeated-key": Problem(T=64, Hk=2, Hv=6, hard="keys"),
    "repeated-key-vector": Problem(T=64, Hk=2, Hv=6, gate="vector", hard="keys"),
    "lengths": Problem(T=37, Hk=2, Hv=6, B=5, lengths=(37, 16, 17, 0, 1)),
    "lengths-vector": Problem(T=37, Hk=2, Hv=6, B=5, gate="vector", lengths=(37, 16, 17, 0, 1)),
    "bf16": replace(WIDE, keys=BF16),
    "bf16-vector": replace(WIDE, keys=BF16, gate="vector"),
    "bf16-no-delta": replace(WIDE, T=40, keys=BF16, delta=False),
    "f32-wide-no-delta": replace(WIDE, T=40, delta=False),
    "f16": Problem(T=20, Hk=1, Hv=3, keys=F16),
    "f32-keys-bf16-values": Problem(T=20, Hk=1, Hv=4, values=BF16),
    "D32": Problem(T=20, Dk=32, Dv=64),
    "D96-vector": Problem(T=20, Dk=96, gate="vector"),
    "D160-vector": Problem(T=20, Dk=160, gate="vector"),
    "D256": Problem(T=20, Dk=256),
    "D256-vector": Problem(T=20, Dk=256, gate="vector"),
}


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """All specializations of this module, compiled side by side."""

    def one(problem, path):
        return lambda collect: problem.on_emulator(path, collect=collect)

    compile_for(one(p, path) for p in PROBLEMS.values() for path in PATHS)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_equals_float64(name, path):
    problem = PROBLEMS[name]
    o, state = problem.differences(problem.on_emulator(path))
    assert o <= problem.within[0], f"outputs off by {o:.1e}"
    assert state <= problem.within[1], f"state off by {state:.1e}"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("gate", ("scalar", "vector"))
def test_every_number_of_tokens_up_to_two_chunks(path, gate):
    for T in (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33):
        problem = Problem(T=T, Hk=2, Hv=6, gate=gate, seed=T)
        o, state = problem.differences(problem.on_emulator(path))
        assert max(o, state) <= 2e-6, f"T = {T}: off by {o:.1e} and {state:.1e}"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ("scalar", "vector", "scalar-no-delta", "vector-no-delta"))
def test_the_order_of_threads_does_not_matter(name, path):
    problem = replace(PROBLEMS[name], T=21)
    same_in_every_order(lambda order, seed: problem.on_emulator(path, order, seed))


@pytest.mark.parametrize("gate", ("scalar", "vector"))
def test_a_prefill_cut_anywhere_is_the_whole(gate):
    problem = Problem(T=35, Hk=2, Hv=6, gate=gate)
    q, k, v, decay, beta, state = problem.inputs()
    with emulated():  # the dispatch table chooses: short pieces take one kernel and long ones the other
        o, end = problem.run()
        for cut in range(1, 35):
            first, middle = ops.recurrence(*(x[:, :cut] for x in (q, k, v, decay, beta)), state, delta=True)
            second, last = ops.recurrence(*(x[:, cut:] for x in (q, k, v, decay, beta)), middle, delta=True)
            pieces = mx.concatenate([first, second], axis=1)
            np.testing.assert_allclose(np.array(pieces), np.array(o), atol=3e-6, err_msg=f"cut at {cut}")
            np.testing.assert_allclose(np.array(last), np.array(end), atol=3e-6, err_msg=f"cut at {cut}")


def test_a_state_written_by_a_kernel_is_the_reference_paths_state():
    problem = PROBLEMS["vector"]
    with ops.use_backend("reference"):
        _, want = problem.run()
    _, got = problem.on_emulator("simdgroup")
    np.testing.assert_allclose(np.array(got), np.array(want), atol=3e-6)


def test_threadgroup_memory_is_what_the_launch_computes():
    for name, problem in PROBLEMS.items():
        with emulated(path="simdgroup") as kernels_made:
            problem.run()
        tile = 4 if problem.gate == "vector" else problem.keys.size
        chunk = kernels.chunk_for(problem.Dk, tile, problem.gate == "vector", problem.delta)
        planned = kernels.tile_bytes(chunk, problem.Dk, tile, problem.gate == "vector", problem.delta)
        used = kernels_made["chunked"].last["threadgroup_memory"]
        assert planned - 9 * 16 <= used <= planned <= kernels.MEMORY, name


@pytest.mark.parametrize("Dk, Dv", [(40, 32), (64, 20), (288, 32)])
def test_a_shape_that_the_kernels_refuse_takes_plain_mlx(Dk, Dv):
    problem = Problem(T=9, Dk=Dk, Dv=Dv)
    with emulated() as made:
        o, state = problem.differences(problem.run())
    assert not made and max(o, state) <= 2e-6


def test_every_width_that_the_table_accepts_has_a_chunk_that_fits():
    for Dk in range(32, 257, 32):
        for size in (2, 4):
            for vector in (False, True):
                for delta in (False, True):
                    assert kernels.chunk_for(Dk, 4 if vector else size, vector, delta)
                    call = dispatch.Call("recurrence", 64, 1, Dk, 64, "vector" if vector else "scalar", delta)
                    assert dispatch.simdgroup_fits(call)
