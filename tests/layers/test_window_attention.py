"""Attention over a window: the same numbers however the tokens arrive, in memory that never grows."""

from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from helpers import assert_close

import mlx_linattn.layers.attend as attend
from mlx_linattn import ops
from mlx_linattn.layers.attention import Attention
from mlx_linattn.ops import reference, use_backend
from mlx_linattn.spec import AttentionSpec, RopeSpec
from mlx_linattn.state import ModelState, WindowState

H, WINDOW = 24, 5


@pytest.fixture
def attention():
    mx.random.seed(7)
    spec = AttentionSpec(heads=4, kv_heads=2, head_dim=8, rope=RopeSpec(4, 100.0), norm_eps=1e-6, window=WINDOW)
    layer = Attention(spec, H)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        layer[name].weight = mx.random.normal(layer[name].weight.shape) * 0.5
    return layer


def run(attention, state, x, counts=None):
    span = state.span(x.shape[0], x.shape[1], counts)
    with state.advancing(span):
        return attention(x, state[0], span)


def fresh(attention):
    return ModelState([attention.make_state()])


def by_formula(attention, x, sinks=0):
    """Every pair of tokens, masked to the window, without any state."""
    spec, T = attention.spec, x.shape[1]
    q, k, v = (p(x).reshape(1, T, -1, 8).swapaxes(1, 2) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
    q, k = (mx.fast.rope(y, 4, traditional=False, base=spec.rope.theta, scale=1.0, offset=0) for y in (q, k))
    i, j = np.arange(T)[:, None], np.arange(T)[None]
    o = reference.attention(q, k, v, 8**-0.5, mx.array((j <= i) & ((j > i - WINDOW) | (j < sinks))))
    return attention.o_proj(o.swapaxes(1, 2).reshape(1, T, -1))


@pytest.mark.parametrize("backend", ["mlx", "reference"])
def test_pieces_of_any_size_equal_the_formula(attention, backend):
    x = mx.random.normal((1, 23, H))
    want = by_formula(attention, x)
    with use_backend(backend):
        for sizes in ([23], [1] * 23, [4, 19], [5, 18], [6, 1, 1, 1, 14], [1, 2, 3, 4, 5, 8], [22, 1], [17, 2, 4]):
            state, edges = fresh(attention), np.cumsum([0, *sizes])
            got = [run(attention, state, x[:, a:b]) for a, b in pairwise(edges)]
            assert_close(mx.concatenate(got, axis=1), want, 5e-5, f"pieces {sizes}")


def test_ragged_rows_are_each_what_they_are_alone(attention):
    x = mx.random.normal((3, 40, H))
    calls = [(7, 2, 4), (1, 3, 0), (1, 1, 1), (1, 0, 1), (2, 9, 6), (1, 1, 1)]
    state, done = fresh(attention), np.zeros(3, int)
    for counts in calls:
        T = max(counts)
        rows = mx.stack([mx.pad(x[r, done[r] : done[r] + n], [(0, T - n), (0, 0)]) for r, n in enumerate(counts)])
        got = run(attention, state, rows, counts)
        done = done + counts
        for r, n in enumerate(counts):
            if n:
                want = by_formula(attention, x[r : r + 1, : done[r]])[0, -n:]
                assert_close(got[r, :n], want, 1e-5, f"row {r} after {done}")


def test_memory_is_the_same_from_the_first_token_on(attention):
    x = mx.random.normal((1, 500, H))
    state = fresh(attention)
    sizes = set()
    for begin, end in ((0, 3), (3, 4), (4, 100), (100, 101), (101, 500)):
        mx.eval(run(attention, state, x[:, begin:end]), state.arrays)
        sizes.add(state.nbytes)
    assert sizes == {2 * 2 * WINDOW * 8 * 4}  # keys and values, heads, columns, features, bytes


def test_a_snapshot_survives_the_buffer_turning_over(attention):
    x = mx.random.normal((1, 40, H))
    state = fresh(attention)
    run(attention, state, x[:, :9])
    snapshot = state.snapshot()
    first = run(attention, state, x[:, 9:20])
    for t in range(20, 40):
        run(attention, state, x[:, t : t + 1])
    state.restore(snapshot)
    assert_close(run(attention, state, x[:, 9:20]), first, 0.0, "again from the snapshot")


def test_a_long_prompt_is_attended_to_in_blocks(attention, monkeypatch):
    monkeypatch.setattr(attend, "BLOCK", 6)
    x = mx.random.normal((2, 23, H))
    counts = (23, 9)
    state = fresh(attention)
    got = run(attention, state, x, counts)
    step = run(attention, state, x[:, :1])
    for r, n in enumerate(counts):
        row = mx.concatenate([x[r : r + 1, :n], x[r : r + 1, :1]], axis=1)
        want = by_formula(attention, row)[0]
        assert_close(got[r, :n], want[:n], 5e-5, f"row {r}")
        assert_close(step[r, 0], want[n], 5e-5, f"row {r}, one more token")


@pytest.mark.parametrize("backend", ["mlx", "reference"])
def test_the_first_tokens_stay_visible_as_sinks(attention, backend):
    x = mx.random.normal((1, 31, H))
    want = by_formula(attention, x, sinks=3)
    with use_backend(backend):
        for sizes in ([31], [1] * 31, [2, 29], [4, 1, 26], [3, 3, 3, 22], [7, 1, 1, 9, 13]):
            state, edges = ModelState([WindowState(WINDOW, 3)]), np.cumsum([0, *sizes])
            got = [run(attention, state, x[:, a:b]) for a, b in pairwise(edges)]
            assert_close(mx.concatenate(got, axis=1), want, 5e-5, f"pieces {sizes}")


def test_tiles_of_keys_mask_what_lies_outside_the_window():
    T, S = 40, 700
    q, k, v = mx.random.normal((2, 4, T, 8)), mx.random.normal((2, 2, S, 8)), mx.random.normal((2, 2, S, 8))
    positions = mx.stack([mx.arange(S) - 5, (mx.arange(S) * 7) % S])
    arguments = {"scale": 0.3, "starts": (600, 500), "positions": positions, "window": 300, "sinks": 4}
    got = ops.attention(q, k, v, **arguments)
    with use_backend("reference"):
        assert_close(got, ops.attention(q, k, v, **arguments), 1e-5)
