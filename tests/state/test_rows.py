"""Rows of states that join, leave, go back and read on are each what they would be alone, bit for bit, for every kind of layer."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_linattn.errors import StateError
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


def test_a_row_alone_takes_no_more_memory_than_it_must():
    rows = Rows(KVOptions())
    rows.add(list(range(1, 200)))
    rows.add([1, 2, 3, 4])
    assert rows.batch.take([1]).nbytes == rows.alone[1].nbytes
    assert rows.batch.kv_nbytes == 2 * rows.alone[0].kv_nbytes


def test_a_state_that_stands_alone_is_not_copied():
    rows = Rows(KVOptions())
    rows.add([1, 2, 3])
    for twin in (rows.batch.take([0]), rows.batch.join(), empty(KVOptions()).join(rows.batch)):
        assert all(a is b for a, b in zip(twin.arrays, rows.batch.arrays, strict=True))
    assert rows.batch.take([]).counts == () and rows.batch.take([]).nbytes == 0


def test_what_does_not_belong_together_is_refused():
    rows = Rows(KVOptions())
    rows.add([1, 2, 3])
    before = rows.batch.snapshot()
    rows.add([4, 5])
    pair = rows.batch.snapshot()
    rows.step(7)
    rows.step(8)  # now each row is longer than either was
    with pytest.raises(StateError, match="cannot restore"):
        rows.batch.restore(before)
    with pytest.raises(StateError, match="cannot restore"):
        rows.batch.take([1, 0]).restore(pair)
    with pytest.raises(StateError, match="cannot restore"):
        rows.batch.take([1]).restore(rows.marks[0][0][0])
    rows.batch.take([0, 1]).restore(pair)
    with pytest.raises(StateError, match=r"rows \[2\] of a state that holds 2"):
        rows.batch.take([2])
    with pytest.raises(StateError, match="keep their context differently"):
        rows.batch.join(empty(KVOptions(max_kv_size=9)))
    with pytest.raises(StateError, match="differ in layer 3"):
        rows.batch.join(ModelState([RecurrentState(2), KVState(), KVState()]))
    with pytest.raises(StateError, match="differ in layer 0"):
        wide = empty(KVOptions())
        read(wide, [[1]])
        wide[0].arrays[0] = mx.zeros((1, 5))
        rows.batch.join(wide)


def test_a_cache_that_went_back_behind_its_first_packed_token_can_be_stored():
    state, again = empty(OPTIONS["quantized later"]), empty(OPTIONS["quantized later"])
    read(state, [[1, 2, 3]])
    snapshot = state.snapshot()
    read(state, [[4, 5, 6, 7, 8, 9]])
    state.restore(snapshot)
    again.load([layer.dump() for layer in state], 3)
    assert_same(again, state)
