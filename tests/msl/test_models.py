"""Whole models with their Metal kernels on the emulator give the reference implementation's logits."""

import mlx.core as mx
import pytest
from helpers import assert_close, check_golden

from mlx_linattn.loading import load_model
from mlx_linattn.ops import use_backend
from msl import emulator
from msl.harness import emulated

pytestmark = pytest.mark.skipif(bool(emulator.MISSING), reason=str(emulator.MISSING))


@pytest.mark.parametrize("name", ("qwen3_5",))
def test_logits_are_the_references(name, fixture_folder):
    model, _ = load_model(fixture_folder(name), dtype="float32")
    with emulated() as made:
        check_golden(model, name)
    assert {"recurrence", "short_conv", "gated_norm"} <= set(made)


def test_the_demo_reads_and_answers_as_it_does_in_plain_mlx():
    model, _ = load_model("demo", dtype="float32")

    def logits():
        cache = model.make_cache()
        return model(mx.arange(3, 43)[None], cache), model(mx.array([[50]]), cache)

    with use_backend("mlx"):
        want = logits()
    with emulated() as made:
        got = logits()
    assert {"chunked", "delta_step"} <= set(made)
    for a, b in zip(got, want):
        assert_close(a, b, 1e-3)
