"""The check on a user's machine, with the emulator in the place of a GPU."""

from itertools import islice

import mlx.core as mx
import pytest
from msl import emulator
from msl.harness import emulated
from msl.mutants import MUTANTS, broken

from mlx_linattn import doctor, ops
from mlx_linattn.ops import dispatch

emulates = pytest.mark.skipif(bool(emulator.MISSING), reason=str(emulator.MISSING))


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    """Verdicts go to a folder of the test; one input an operation, since each costs a compilation here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    dispatch.switched_off.cache_clear()
    few = {op: (lambda f=f: islice(f(), 1)) for op, f in doctor.INPUTS.items()}
    monkeypatch.setattr(doctor, "INPUTS", few)
    monkeypatch.setattr(doctor, "bandwidth", lambda: 1e11)
    monkeypatch.setattr(doctor, "decode_share", lambda copy: (1e-3, 0.5))
    yield
    dispatch.switched_off.cache_clear()


def test_every_kernel_of_the_table_has_an_input():
    assert {row.op for row in dispatch.TABLE} <= set(doctor.INPUTS)


@emulates
def test_kernels_that_are_right_stay_on(capsys):
    with emulated():
        assert doctor.main([]) == 0
    out = capsys.readouterr().out
    for row in dispatch.TABLE:
        if "metal" in row.devices and row.devices != dispatch.ANY:
            assert f"{row.op:<15} {row.path:<12} equals the reference" in out
    assert dispatch.switched_off() == frozenset()


@emulates
def test_a_kernel_that_is_wrong_is_switched_off_with_a_warning(monkeypatch, capsys):
    mutant = next(m for m in MUTANTS if m.what == "a decay too many")
    with emulated(sources=broken(mutant)):
        assert doctor.main([]) == 1
    captured = capsys.readouterr()
    assert "simdgroup    off by" in captured.out and "packed       equals the reference" in captured.out
    assert "simdgroup" in captured.err and "issue" in captured.err
    call = dispatch.Call("recurrence", 64, 4, 64, 64, "scalar", True, mx.float32)
    monkeypatch.setattr(dispatch, "device", lambda: "metal")
    assert dispatch.choose(call).path == "chunked"
    with ops.use_backend("metal"):  # who asks for it by name gets it
        assert dispatch.choose(call).path == "simdgroup"


def test_a_verdict_holds_for_one_machine_and_one_mlx(monkeypatch):
    dispatch.switch_off({"packed"})
    assert dispatch.switched_off() == {"packed"}
    monkeypatch.setattr(dispatch, "machine", lambda: "another")
    dispatch.switched_off.cache_clear()
    assert dispatch.switched_off() == frozenset()


def test_a_machine_without_a_gpu_says_so(capsys):
    assert doctor.main([]) == 0
    assert "no GPU is in use" in capsys.readouterr().out
