"""The gated-delta mixer for a few tokens in plain MLX: every gate, dtypes, padding and snapshots."""

import mlx.core as mx
import numpy as np
import pytest
from formulas import as64, check_delta_mixer, delta_mixer_arrays
from helpers import assert_close

from mlx_linattn import ops

SHAPES = [
    (1, 1, 2, 4, 32, 32),
    (2, 3, 1, 4, 64, 32),
    (1, 8, 2, 2, 32, 96),
    (1, 5, 1, 3, 128, 128),
    (1, 37, 2, 4, 24, 40),
]


@pytest.mark.parametrize("T", [1, 5])
def test_delta_mixer_without_decay_and_gate(T):
    check_delta_mixer(1, T, 1, 2, 32, 32, without=("a", "A_log", "dt_bias", "z"))


@pytest.mark.parametrize("backend", ["reference", "mlx"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("vector", [False, True])
def test_delta_mixer_is_its_formula(backend, shape, vector):
    with ops.use_backend(backend):
        check_delta_mixer(*shape, vector=vector)


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("T", [1, 5])
def test_delta_mixer_knows_every_published_gate(vector, T):
    options = {"lower_bound": -5.0, "beta_scale": 2.0, "output_gate": "sigmoid", "eps": 1e-5}
    check_delta_mixer(1, T, 1, 2, 32, 32, vector=vector, **options)


def test_a_slow_decay_keeps_its_digits():
    check_delta_mixer(1, 5, 1, 2, 32, 32, slow=True)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("T", [1, 5])
def test_delta_mixer_takes_half_precision(dtype, T):
    check_delta_mixer(2, T, 1, 2, 64, 32, dtype=dtype)


@pytest.mark.parametrize("snapshots", [False, True])
@pytest.mark.parametrize("lengths", [(5, 3, 1, 0), (5, 5, 5, 5)])
def test_padded_tokens_change_neither_window_nor_state(snapshots, lengths):
    check_delta_mixer(4, 5, 1, 2, 32, 32, lengths=lengths, snapshots=snapshots)
    check_delta_mixer(4, 1, 1, 2, 32, 32, lengths=[min(n, 1) for n in lengths], snapshots=snapshots)


def test_a_draft_of_which_some_tokens_are_kept_continues_from_its_snapshot():
    given = delta_mixer_arrays(2, 4, 1, 2, 32, 32)
    sizes = {"key_heads": 1, "value_heads": 2, "key_dim": 32, "value_dim": 32}
    y, windows, states = ops.delta_mixer(**given, **sizes, snapshots=True)
    for n in (1, 2, 3):
        tail = {name: given[name][:, n:] for name in ("qkv", "a", "b", "z")}
        kept = {"window": windows[:, n - 1], "state": states[:, n - 1]}
        rest, window, state = ops.delta_mixer(**given | tail | kept, **sizes)
        assert_close(rest, np.array(y[:, n:]), 1e-5)
        assert_close(window, as64(windows[:, -1]), 0)
        assert_close(state, as64(states[:, -1]), 1e-5)
