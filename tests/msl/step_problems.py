"""Checks of the step, scan, convolution and norm kernels: each compares the backend in force with float64."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import formulas
import mlx.core as mx

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
        "as many heads as fill a GPU": mixer(64, 1, 1, 4, 32, 64),
        "no decay, no gate": mixer(1, 3, 1, 2, 32, 32, without=("a", "A_log", "dt_bias", "z")),
        "slow decay": mixer(1, 5, 1, 2, 32, 32, slow=True),
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


def only_launch(check) -> None:
    """Run a check only for the kernels that it launches, where nothing is computed and so nothing is right."""
    with suppress(AssertionError):
        check()
