"""The fused delta step, the scans, the short convolution and the gated norms on the emulator against float64."""

import formulas
import mlx.core as mx
import numpy as np
import pytest

from mlx_linattn import ops
from mlx_linattn.ops import mixer_kernels
from msl import emulator
from msl.harness import compile_for, emulated, same_in_every_order
from msl.step_problems import CHECKS, conv, mixer, only_launch, selective

pytestmark = pytest.mark.skipif(bool(emulator.MISSING), reason=str(emulator.MISSING))

CASES = [(kernel, name) for kernel, checks in CHECKS.items() for name in checks]


@pytest.fixture(scope="module", autouse=True)
def compiled():
    def one(check):
        def run(collect):
            with emulated(collect=collect):
                only_launch(check)

        return run

    compile_for(one(check) for checks in CHECKS.values() for check in checks.values())


@pytest.mark.parametrize("kernel, name", CASES)
def test_equals_float64_in_every_order_of_threads(kernel, name):
    def run(order, seed):
        with emulated(order, seed) as made:
            results = CHECKS[kernel][name]()
        assert list(made) == [kernel], f"{list(made)} ran"
        return results

    same_in_every_order(run)


@pytest.mark.parametrize("T", range(1, 9))
def test_a_step_cut_anywhere_is_the_whole(T):
    given = formulas.delta_mixer_arrays(1, 8, 1, 2, 32, 32)
    sizes = {"key_heads": 1, "value_heads": 2, "key_dim": 32, "value_dim": 32}
    with emulated():
        whole, *end = ops.delta_mixer(**given, **sizes)
        first, window, state = ops.delta_mixer(**given | _cut(given, slice(0, T)), **sizes)
        if T < 8:
            rest = given | _cut(given, slice(T, 8)) | {"window": window, "state": state}
            second, window, state = ops.delta_mixer(**rest, **sizes)
            first = mx.concatenate([first, second], axis=1)
    for got, want in ((first, whole), (window, end[0]), (state, end[1])):
        np.testing.assert_allclose(np.array(got), np.array(want), atol=2e-6)


def _cut(given, part):
    return {name: given[name][:, part] for name in ("qkv", "a", "b", "z")}


@pytest.mark.parametrize("cut", (1, 7, 8, 9, 31, 32, 33, 39))
def test_a_scan_cut_anywhere_is_the_whole(cut):
    for scan, arrays, tokens in (
        (ops.diagonal_scan, formulas.diagonal_arrays(2, 40, 6), ("decay", "update")),
        (ops.selective_scan, formulas.selective_arrays(2, 40, 6, 4), ("x", "delta", "B", "C")),
    ):
        with emulated():
            whole, last = scan(**arrays)
            first, middle = scan(**arrays | {name: arrays[name][:, :cut] for name in tokens})
            second, end = scan(**arrays | {name: arrays[name][:, cut:] for name in tokens} | {"state": middle})
        pieces = mx.concatenate([first, second], axis=1)
        np.testing.assert_allclose(np.array(pieces), np.array(whole), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(np.array(end), np.array(last), rtol=1e-5, atol=1e-5)


def test_a_short_conv_cut_anywhere_is_the_whole():
    rng = np.random.default_rng(0)
    x, weight = mx.array(formulas.normal(rng, 2, 12, 5)), mx.array(formulas.normal(rng, 5, 4))
    with emulated():
        whole, end = ops.short_conv(x, weight)
        for cut in range(1, 12):
            first, window = ops.short_conv(x[:, :cut], weight)
            second, window = ops.short_conv(x[:, cut:], weight, window=window)
            np.testing.assert_array_equal(np.array(mx.concatenate([first, second], axis=1)), np.array(whole))
            np.testing.assert_array_equal(np.array(window), np.array(end))


def test_a_layer_that_starts_has_an_empty_window_and_state():
    given = formulas.delta_mixer_arrays(1, 2, 1, 2, 32, 32)
    sizes = {"key_heads": 1, "value_heads": 2, "key_dim": 32, "value_dim": 32}
    empty = {name: mx.zeros_like(given[name]) for name in ("window", "state")}
    with emulated():
        pairs = zip(
            ops.delta_mixer(**given | {"window": None, "state": None}, **sizes),
            ops.delta_mixer(**given | empty, **sizes),
        )
    for got, want in pairs:
        np.testing.assert_array_equal(np.array(got), np.array(want))


def test_threadgroup_memory_of_the_step_is_what_the_launch_computes():
    for name, check in CHECKS["delta_step"].items():
        with emulated() as made:
            check()
        _, T, _, _, Dk, Dv = check.args
        vector = check.keywords.get("vector", False)
        tokens = 1 if T == 1 else 4 if (vector and Dk == 256) else 8
        assert made["delta_step"].last["threadgroup_memory"] == mixer_kernels.step_memory(tokens, Dk, Dv, vector), name


REFUSED = [
    mixer(1, 2, 1, 1, 40, 32),
    mixer(1, 2, 1, 1, 32, 288),
    selective(1, 5, 8, 6),
    selective(1, 5, 8, 128),
    conv(1, 5, 8, 9),
]


@pytest.mark.parametrize("check", REFUSED)
def test_a_shape_that_the_kernels_refuse_takes_plain_mlx(check):
    name = {formulas.check_delta_mixer: "delta_step", formulas.check_selective_scan: "scan/selective_scan"}
    with emulated() as made:
        check()
    assert name.get(check.func, "short_conv") not in made
