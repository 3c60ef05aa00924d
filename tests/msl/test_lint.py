"""Address spaces and conversions of the kernels, as Apple's compiler would check them. Needs clang."""

from concurrent.futures import ThreadPoolExecutor
from importlib import resources

import mlx.core as mx
import pytest

from mlx_linattn import metal
from msl import emulator
from msl.harness import emulated
from msl.lint import CLANG, lint, lint_file
from msl.problems import Problem
from msl.step_problems import CHECKS, only_launch

pytestmark = pytest.mark.skipif(CLANG is None, reason="checking address spaces needs clang")

FILES = sorted(f.name for f in resources.files(metal).iterdir() if f.name.endswith(".metal"))


def sources():
    """One traced source for each way a kernel's text differs: dtypes, gates, and arrays small enough for constant memory."""
    collected: list[str] = []
    for path in ("packed", "simdgroup"):
        for gate, keys, T in (("scalar", mx.float32, 9), ("vector", mx.bfloat16, 9), ("scalar", mx.bfloat16, 1)):
            with emulated(path=path, collect=collected):
                Problem(T=T, Dk=64, Dv=32, gate=gate, keys=keys).run()
    for checks in CHECKS.values():
        for check in list(checks.values())[:3]:
            with emulated(collect=collected):
                only_launch(check)
    return list(dict.fromkeys(collected))


@pytest.mark.skipif(bool(emulator.MISSING), reason=str(emulator.MISSING))
def test_every_traced_kernel_is_clean():
    found = sources()
    with ThreadPoolExecutor() as pool:
        said = [text for text in pool.map(lint, found) if text]
    assert found and not said, said[0]


@pytest.mark.parametrize("file", FILES)
def test_a_file_is_complete_metal(file):
    assert not lint_file((resources.files(metal) / file).read_text())


BUGS = {
    "a pointer without its address space": ("device VT* op =", "VT* op ="),
    "a wrong address space": ("device VT* op =", "threadgroup VT* op ="),
    "bfloat without a cast": ("op[0] = VT(out)", "op[0] = out"),
    "a write to an input": ("op[0] = VT(out)", "vp[0] = VT(out)"),
    "an undeclared name": ("recalled += s", "recaled += s"),
    "a pointer into constant memory": ("auto bp =", "const device float* bp ="),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_wrong_kernel_is_seen(bug):
    old, new = BUGS[bug]

    def sources(name):
        s = metal.source(name)
        assert old in s.body
        return s._replace(body=s.body.replace(old, new, 1))

    collected: list[str] = []
    with emulated(path="packed", collect=collected, sources=sources):
        Problem(T=1, Dk=64, Dv=32, keys=mx.bfloat16).run()
    assert "error" in lint(collected[0]) or "warning" in lint(collected[0])
