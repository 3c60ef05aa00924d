"""Every broken version of the recurrence kernels is seen: a wrong number, a refusal, or bits that depend on the threads' order."""

import numpy as np
import pytest

from msl import emulator
from msl.harness import compile_for
from msl.mutants import MUTANTS, broken
from msl.problems import Problem

pytestmark = pytest.mark.skipif(bool(emulator.MISSING), reason=str(emulator.MISSING))

PATH = {"recurrence": "packed", "chunked": "simdgroup"}
OURS = [m for m in MUTANTS if m.kernel in PATH]
#: The problems that are tried on a mutant, one after another. All have Dk 64 and Dv 32, so that few kernels are compiled.
PROBES = (
    Problem(T=21, Hk=2, Hv=6, hard="gates"),
    Problem(T=21, Hk=2, Hv=6, gate="vector"),
    Problem(T=21, Hk=2, Hv=6, gate="vector", hard="gates"),
    Problem(T=21, Hk=2, Hv=6, B=2, lengths=(18, 3)),
    Problem(T=21, Hk=2, Hv=6, hard="keys"),
)


def seen_by(mutant):
    for problem in PROBES:
        first = None
        for order, seed in emulator.ORDERS:
            try:
                got = problem.on_emulator(PATH[mutant.kernel], order, seed, sources=broken(mutant))
            except RuntimeError as error:
                return problem, str(error)
            worst = problem.differences(got)
            if any(a > b for a, b in zip(worst, problem.within)):
                return problem, worst
            bits = b"".join(np.array(x).tobytes() for x in got)
            if bits != (first := first or bits):
                return problem, f"order {order}"
    return None


@pytest.fixture(scope="module", autouse=True)
def compiled():
    def one(mutant, problem):
        return lambda collect: problem.on_emulator(PATH[mutant.kernel], collect=collect, sources=broken(mutant))

    compile_for(one(m, p) for m in OURS for p in PROBES[:1])


@pytest.mark.parametrize("mutant", OURS, ids=lambda m: f"{m.kernel}: {m.what}")
def test_a_broken_kernel_is_seen(mutant):
    assert seen_by(mutant), f"no check sees it: {mutant.old!r} -> {mutant.new!r}"


@pytest.mark.parametrize("path", PATH.values())
def test_the_probes_pass_on_the_kernels_themselves(path):
    for problem in PROBES:
        for order, seed in emulator.ORDERS:
            worst = problem.differences(problem.on_emulator(path, order, seed))
            assert all(a <= b for a, b in zip(worst, problem.within)), (problem, worst)
