"""Rows of states that join, leave, go back and read on are each what they would be alone, bit for bit, for every kind of layer."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_linattn.state import KVOptions, KVState, ModelState, RecurrentState, WindowState

OPTIONS = {
    "growing": KVOptions(),
    "quantized": KVOptions(kv_bits=8, kv_group_size=32),
    "quantized later": KVOptions(kv_bits=4, kv_group_size=32, quantized_kv_start=6),
    "bounded": KVOptions(max_kv_size=7),
}
WIDTH = 32


@pytest.fixture(autouse=True, scope="module")
def small_buffers():
    """Capacities in threes, so that short rows cross them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVState, "FIRST", 3)
        yield


def empty(options) -> ModelState:
    """Every kind of layer: a matrix and a window of inputs, keys and values, latents, and attention in a window of its own."""
    return ModelState([RecurrentState(2), KVState(), KVState(), WindowState(3, 1)], options)


def read(state: ModelState, rows: list[list[int]]) -> None:
    """What a model would do, with nothing in it that could round: each token brings numbers of its own."""
    lengths, T = [len(row) for row in rows], max(map(len, rows))
    span = state.span(len(rows), T, lengths)
    numbers = np.zeros((len(rows), 2, T, WIDTH), np.float32)
    for r, row in enumerate(rows):
        for t, token in enumerate(row):
            numbers[r, :, t] = np.random.default_rng(token).standard_normal((2, WIDTH))
    numbers = mx.array(numbers)
    recurrent, kv, latent, window = state
    with state.advancing(span):
        old = recurrent.arrays
        last = [[row[-1], len(row)] for row in rows]
        total = mx.array([sum(row) for row in rows])[:, None]
        recurrent.arrays = [total if old[0] is None else 3 * old[0] + total, mx.array(last)]
        kv.append(span, numbers, -numbers)
        latent.append(span, numbers[:, :1])
        window.append(span, numbers, 2 * numbers)


def assert_same(state: ModelState, want: ModelState) -> None:
    assert state.counts == want.counts
    for layer, alone in zip(state, want):
        for got, expected in zip(layer.dump(), alone.dump(), strict=True):
            assert got.dtype == expected.dtype and mx.array_equal(got, expected)


class Rows:
    """States of several rows, and for each row a state of its own that the same is done to."""

    def __init__(self, options):
        self.options = options
        self.batch, self.alone = empty(options), []
        self.marks: list[list] = []  # for each row (snapshot of it alone in a state, tokens then)

    def add(self, tokens):
        state, alone = empty(self.options), empty(self.options)
        read(state, [tokens])
        read(alone, [tokens])
        self.batch = self.batch.join(state)
        self.alone.append(alone)
        self.marks.append([(state.snapshot(), alone.snapshot())])

    def step(self, tokens):
        if self.alone:
            rows = [[tokens + r] for r in range(len(self.alone))]
            read(self.batch, rows)
            for alone, row in zip(self.alone, rows):
                read(alone, [row])

    def ragged(self, tokens):
        if self.alone:
            rows = [list(range(tokens, tokens + 1 + (tokens + r) % 4)) for r in range(len(self.alone))]
            read(self.batch, rows)
            for alone, row in zip(self.alone, rows):
                read(alone, [row])

    def order(self, seed):
        rows = list(np.random.default_rng(seed).permutation(len(self.alone)))
        self.batch = self.batch.take([int(row) for row in rows])
        self.alone = [self.alone[row] for row in rows]
        self.marks = [self.marks[row] for row in rows]

    def leave(self, which, back):
        """One row leaves, is what it would be, goes back perhaps to before it joined, reads on and joins again."""
        if not self.alone:
            return
        row = which % len(self.alone)
        state = self.batch.take([row])
        self.batch = self.batch.take([r for r in range(len(self.alone)) if r != row])
        alone, marks = self.alone.pop(row), self.marks.pop(row)
        assert_same(state, alone)
        if back:
            there, here = marks[0]
            state.restore(there)
            alone.restore(here)
            assert_same(state, alone)
            read(state, [[which, back]])
            read(alone, [[which, back]])
        self.batch = self.batch.join(state)
        self.alone.append(alone)
        self.marks.append(marks)

    def undo(self, tokens):
        if self.alone:
            snapshot, alone = self.batch.snapshot(), [one.snapshot() for one in self.alone]
            self.step(tokens)
            self.ragged(tokens)
            self.batch.restore(snapshot)
            for one, part in zip(self.alone, alone):
                one.restore(part)

    def check(self):
        for row, alone in enumerate(self.alone):
            assert_same(self.batch.take([row]), alone)


small = st.integers(1, 99)
actions = st.one_of(
    st.tuples(st.just("add"), st.lists(small, min_size=1, max_size=9)),
    st.tuples(st.sampled_from(["step", "ragged", "undo", "order"]), small),
    st.tuples(st.just("leave"), small, st.integers(0, 2)),
)


@pytest.mark.parametrize("options", OPTIONS)
@given(steps=st.lists(actions, min_size=3, max_size=10))
def test_whatever_rows_do_together_each_is_what_it_is_alone(options, steps):
    rows = Rows(OPTIONS[options])
    rows.add([5, 6, 7])
    for action, *arguments in steps:
        getattr(rows, action)(*arguments)
    rows.check()
