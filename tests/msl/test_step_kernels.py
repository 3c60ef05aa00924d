"""The fused delta step, the scans, the short convolution and the gated norms on the emulator against float64."""

from contextlib import suppress
from functools import partial

import formulas
import mlx.core as mx
import numpy as np
import pytest

from mlx_linattn import ops
from mlx_linattn.ops import mixer_kernels
from msl import emulator
from msl.harness import compile_for, emulated, same_in_every_order

pytestmark = pytest.mark.skipif(bool(emulator.MISSING), reason=str(emulator.MISSING))

BF16, F16 = mx.bfloat16, mx.float16
mixer, diagonal, selective = (
    partial(partial, f)
    for f in (formulas.check_delta_mixer, formulas.check_diagonal_scan, formulas.check_selective_scan)
)
conv, then_gate, then_norm = (
    partial(partial, f)
    for f in (formulas.check_short_conv, formulas.check_norm_then_gate, formulas.check_gate_then_norm)
)
PUBLISHED = {"lower_bound": -5.0, "beta_scale": 2.0, "output_gate": "sigmoid", "eps": 1e-5}

#: One check a kernel and its specializations; each runs in every order of threads.
CHECKS = {
    "delta_step": {
        "one token": mixer(1, 1, 2, 4, 32, 32),
        "one token, vector": mixer(2, 1, 1, 1, 64, 64, vector=True, **PUBLISHED),
        "four heads a key, Dk > Dv": mixer(2, 3, 1, 4, 64, 32),
        "Dk < Dv": mixer(1, 8, 2, 2, 32, 96, vector=True),
        "lower bound": mixer(1, 5, 1, 2, 32, 32, **PUBLISHED),
        "lower bound, vector": mixer(1, 5, 1, 2, 32, 32, vector=True, **PUBLISHED),
        "three heads a key": mixer(1, 5, 1, 3, 128, 128),
        "vector of 128": mixer(1, 2, 1, 1, 128, 128, vector=True),
        "widest": mixer(1, 8, 1, 1, 256, 256),
        "widest, vector, in two dispatches": mixer(2, 8, 1, 1, 256, 256, vector=True, lengths=[7, 2]),
        "lengths": mixer(4, 5, 1, 2, 32, 32, lengths=[5, 3, 1, 0]),
        "snapshots": mixer(1, 4, 1, 2, 32, 32, snapshots=True),
        "snapshots and lengths": mixer(4, 5, 1, 2, 32, 32, lengths=[5, 3, 1, 0], snapshots=True),
        "snapshots in two dispatches": mixer(1, 6, 1, 1, 256, 256, vector=True, snapshots=True),
        "bfloat16": mixer(2, 2, 1, 2, 96, 64, dtype=BF16),
        "float16, three taps": mixer(2, 2, 1, 2, 64, 64, dtype=F16, K=3),
    },
    "scan/diagonal_scan": {
        "one token": diagonal(1, 1, 5),
        "one segment": diagonal(2, 7, 33),
        "two segments": diagonal(1, 9, 64),
        "a whole tile": diagonal(1, 128, 32),
        "one more than a tile": diagonal(2, 129, 40),
        "three tiles": diagonal(1, 300, 3),
        "lengths": diagonal(4, 20, 40, lengths=[20, 17, 1, 0]),
        "bfloat16": diagonal(2, 20, 40, dtype=BF16),
    },
    "scan/selective_scan": {
        "one token": selective(1, 1, 5, 16),
        "no D": selective(2, 7, 33, 16, skip=False),
        "one more than is staged": selective(1, 33, 64, 8),
        "widest": selective(2, 70, 40, 64),
        "lengths": selective(4, 40, 20, 4, lengths=[40, 33, 1, 0]),
        "bfloat16": selective(2, 40, 40, 16, dtype=BF16),
    },
    "short_conv": {
        "one token": conv(2, 1, 130),
        "prompt": conv(2, 19, 40, lengths=[19, 2]),
        "plain": conv(1, 8, 5, 2, bias=False, silu_after=False),
        "lengths": conv(4, 9, 5, 3, lengths=[0, 1, 8, 9], dtype=BF16),
    },
    "gated_norm": {
        "heads": then_gate((2, 3, 4, 40)),
        "sigmoid": then_gate((1, 1, 3, 128), "sigmoid"),
        "one SIMD-group, groups": then_norm((2, 3, 96), 3),
        "four SIMD-groups": then_norm((2, 3, 600), dtype=BF16),
        "many SIMD-groups, groups": then_norm((1, 2, 9000), 2),
    },
}  # fmt: skip
CASES = [(kernel, name) for kernel, checks in CHECKS.items() for name in checks]


@pytest.fixture(scope="module", autouse=True)
def compiled():
    def one(check):
        def run(collect):
            # Nothing runs while sources are collected, so nothing is right.
            with emulated(collect=collect), suppress(AssertionError):
                check()

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
