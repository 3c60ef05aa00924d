"""Every broken version of the step, scan, convolution and norm kernels is seen by one of their checks."""

import numpy as np
import pytest

from msl import emulator
from msl.harness import compile_for, emulated
from msl.mutants import MUTANTS, broken
from msl.step_problems import CHECKS, only_launch

pytestmark = pytest.mark.skipif(bool(emulator.MISSING), reason=str(emulator.MISSING))

#: The checks that are tried on a mutant, one after another.
PROBES = {
    "delta_step": (
        "Dk < Dv",
        "snapshots and lengths",
        "four heads a key, Dk > Dv",
        "slow decay",
        "lower bound",
        "one token",
    ),
    "scan/diagonal_scan": ("one more than a tile", "lengths"),
    "scan/selective_scan": ("one more than is staged", "lengths"),
    "short_conv": ("prompt", "lengths"),
    "gated_norm": ("one SIMD-group, groups", "many SIMD-groups, groups", "heads"),
}
OURS = [m for m in MUTANTS if m.kernel in PROBES]


def seen_by(mutant):
    for name in PROBES[mutant.kernel]:
        for order, seed in emulator.ORDERS:
            try:
                with emulated(order, seed, sources=broken(mutant)), np.errstate(all="ignore"):
                    CHECKS[mutant.kernel][name]()
            except (AssertionError, RuntimeError):
                return name, order
    return None


@pytest.fixture(scope="module", autouse=True)
def compiled():
    def one(mutant, name):
        def run(collect):
            with emulated(collect=collect, sources=broken(mutant)):
                only_launch(CHECKS[mutant.kernel][name])

        return run

    compile_for(one(m, PROBES[m.kernel][0]) for m in OURS)


@pytest.mark.parametrize("mutant", OURS, ids=lambda m: f"{m.kernel}: {m.what}")
def test_a_broken_kernel_is_seen(mutant):
    assert seen_by(mutant), f"no check sees it: {mutant.old!r} -> {mutant.new!r}"


def test_the_probes_pass_on_the_kernels_themselves():
    for kernel, names in PROBES.items():
        for name in names:
            with emulated():
                CHECKS[kernel][name]()
