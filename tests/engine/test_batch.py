"""Rows that decode together give the tokens that each gives alone, whatever joins, leaves and fails meanwhile."""

from __future__ import annotations

import mlx.core as mx
import pytest
from counting import Dispatches
from helpers import FIXTURES, assert_close, held, tolerance

import mlx_linattn as la
from mlx_linattn import budget
from mlx_linattn.engine.batch import Batch
from mlx_linattn.errors import MemoryLimitError, RequestError, StateError
from mlx_linattn.state import KVOptions, KVState

FORMATS = ("fp8", "nvfp4", "split_text")  # of families that are here already
FAMILIES = sorted(
    file.parent.name for file in FIXTURES.glob("*/tensors.json") if not file.parent.name.endswith(FORMATS)
)
LENGTHS = (9, 1, 23, 14, 5)  # of prompts
TOKENS = (7, 12, 3, 9, 6)  # of answers


def prompt(row: int, length: int) -> list[int]:
    return [8 + (i * i * 3 + row * 17) % 77 for i in range(length)]


PROMPTS = [prompt(row, length) for row, length in enumerate(LENGTHS)]


def sampler(seed: int):
    """Random choices that depend on nothing but the seed."""
    key = [mx.random.key(seed)]

    def choose(logprobs):
        key[0], now = mx.random.split(key[0])
        return mx.random.categorical(logprobs, key=now)

    return choose


def not_again(tokens, logits):
    """No token twice."""
    return mx.put_along_axis(logits, tokens[None], mx.array(-1e9), axis=-1)


CHOICES = [{}, {"sampler": 1}, {"logits_processors": [not_again]}, {"sampler": 2, "logits_processors": [not_again]}, {}]


def choice(row: int) -> dict:
    chosen = dict(CHOICES[row])
    if "sampler" in chosen:
        chosen["sampler"] = sampler(chosen["sampler"])
    return chosen


def alone(model, tokens, count, **options) -> list[tuple[int, mx.array]]:
    return list(la.generate_step(tokens, model, max_tokens=count, **options))


def run(batch, steps: int = -1) -> list:
    """Everything that happens, until the batch is idle or for so many steps."""
    events = []
    while not batch.idle and steps != 0:
        events += batch.step()
        steps -= 1
    return events


def assert_as_alone(rows, events, want, within: float) -> None:
    """``want``: for each row what :func:`alone` gave."""
    for i, (row, expected) in enumerate(zip(rows, want, strict=True)):
        assert row.tokens[row.prompt_tokens :] == [token for token, _ in expected], f"row {i}"
        said = [event for event in events if event.row is row and event.token is not None]
        assert [event.token for event in said] == [token for token, _ in expected]
        for event, (_, logprobs) in zip(said, expected):
            assert_close(event.logprobs, logprobs, within, f"row {i}")
        assert row.state.counts == (len(row.tokens),)


def assert_goes_on(model, tokens, state, within: float = 1e-3) -> None:
    """The state has read exactly these tokens."""
    assert state.offset == len(tokens)
    fresh = model(mx.array([[*tokens, 9, 10]]))[:, -2:]
    assert_close(model(mx.array([[9, 10]]), state), fresh, within)


@pytest.fixture(scope="module")
def demo():
    return la.load_model("demo", dtype="float32")[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_row_says_what_it_says_alone(name, fixture_folder):
    model = la.load_model(fixture_folder(name), dtype="float32")[0]
    batch = Batch(model, max_rows=3, prefill_step=8)
    rows = [batch.add(PROMPTS[row], max_tokens=TOKENS[row], **choice(row)) for row in range(4)]
    events = run(batch, 5)
    assert len(batch.rows) > 1 and batch.waiting
    rows.append(batch.add(PROMPTS[4], max_tokens=TOKENS[4]))
    events += run(batch)
    want = [alone(model, PROMPTS[row], TOKENS[row], **choice(row)) for row in range(5)]
    assert_as_alone(rows, events, want, 10 * tolerance(name))


@pytest.mark.parametrize(
    "options",
    [
        {"kv_bits": 8, "kv_group_size": 32},
        {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 12},
        {"max_kv_size": 12},
    ],
    ids=lambda options: next(iter(options)) + str(options.get("quantized_kv_start", "")),
)
def test_however_attention_keeps_its_context(demo, options):
    batch = Batch(demo, KVOptions(**options), max_rows=4, prefill_step=64)
    rows = [batch.add(PROMPTS[row], max_tokens=TOKENS[row]) for row in range(5)]
    events = run(batch)
    want = [alone(demo, PROMPTS[row], TOKENS[row], **options) for row in range(5)]
    assert_as_alone(rows, events, want, 0.1)  # what rounds the other way is stored as another number


def test_rows_beyond_max_rows_wait_in_order(demo):
    batch = Batch(demo, max_rows=2)
    rows = [batch.add(PROMPTS[row], max_tokens=4) for row in range(4)]
    assert batch.waiting == rows and batch.rows == []
    first = [event.row for event in run(batch) if event.token is not None]
    assert list(dict.fromkeys(first)) == rows
    assert first.index(rows[2]) > first.index(rows[0]) + 3, "the third began before the first had left"
    assert batch.idle and batch.state.nbytes == 0


def test_a_long_prompt_does_not_stall_the_others(demo):
    batch = Batch(demo, prefill_step=16)
    other = batch.add(PROMPTS[0])
    batch.step()
    long, short = batch.add(prompt(1, 160), max_tokens=1), batch.add(PROMPTS[2], max_tokens=1)
    order, steps = [], 0
    while long.state is None:
        events = batch.step()
        steps += 1
        order += [event.row for event in events if event.token is None]
        read = [event.done for event in events if event.row is long and event.token is None]
        assert all(done % 16 == 0 for done in read)
        assert [event.row for event in events].count(other) == 1, "no token in this step"
    assert steps == 12, "160 and 23 tokens, 16 at a time"
    assert order[:4] == [long, short, long, short]
    assert len(other.tokens) == other.prompt_tokens + 1 + steps


def test_a_row_that_is_removed_takes_its_state_along(demo):
    batch = Batch(demo, max_rows=3, prefill_step=8)
    rows = [batch.add(PROMPTS[row], max_tokens=9) for row in (0, 1)]
    events = run(batch, 4)
    rows += [batch.add(prompt(5, 30), max_tokens=4), batch.add(PROMPTS[3], max_tokens=4)]
    events += run(batch, 2)
    assert set(batch.rows) == set(rows[:2]) and batch.waiting == rows[2:]
    for row, offset in ((rows[3], 0), (rows[2], 16), (rows[0], len(rows[0].tokens))):
        state = batch.remove(row)
        assert state is row.state and state.offset == offset
        assert_goes_on(demo, row.tokens[:offset], state)
    following = alone(demo, PROMPTS[0], offset - len(PROMPTS[0]) + 1)[-1]
    assert rows[0].following[0] == following[0]
    assert_close(rows[0].following[1], following[1], 1e-3)
    with pytest.raises(RequestError, match="not in the batch"):
        batch.remove(rows[0])
    events += run(batch)
    assert_as_alone(rows[1:2], events, [alone(demo, PROMPTS[1], 9)], 1e-3)


def test_an_answer_goes_on_from_a_state_and_from_a_checkpoint(demo):
    first, second = PROMPTS[2], prompt(7, 11)
    marks = []
    batch = Batch(demo, prefill_step=4)
    batch.add(PROMPTS[0], max_tokens=30)
    row = batch.add(first, max_tokens=5, ends=(3, 9, 23, 99), checkpoints=lambda state: marks.append(state.snapshot()))
    run(batch, 25)
    assert [mark.counts for mark in marks] == [(3,), (9,), (23,)]
    assert_goes_on(demo, row.tokens, row.state.fork())
    tokens, state = [*row.tokens, *second], row.state.fork()
    again = batch.add(tokens, state=state, max_tokens=6)
    assert again.reused_tokens == len(row.tokens)
    events = run(batch)
    assert_as_alone([again], events, [alone(demo, tokens, 6)], 1e-3)
    assert [(event.done, event.total) for event in events if event.row is again and event.token is None] == [
        (4, 11),
        (8, 11),
        (11, 11),
    ]
    row.state.restore(marks[1])
    assert_goes_on(demo, first[:9], row.state)


def test_stop_tokens_end_an_answer(demo):
    answer = [token for token, _ in alone(demo, PROMPTS[2], 9)]
    batch = Batch(demo)
    row, other = batch.add(PROMPTS[2], stop_tokens={answer[4]}), batch.add(PROMPTS[0], max_tokens=9)
    events = run(batch)
    assert row.tokens == [*PROMPTS[2], *answer[: answer.index(answer[4]) + 1]]
    assert [(event.row, event.finish_reason) for event in events if event.finish_reason] == [
        (row, "stop"),
        (other, "length"),
    ]
    assert_goes_on(demo, row.tokens, row.state)


def failing_at(count: int):
    calls = []

    def sampler(logprobs):
        calls.append(1)
        if len(calls) == count:
            raise ZeroDivisionError
        return mx.argmax(logprobs, axis=-1)

    return sampler


def test_a_row_that_fails_leaves_and_the_others_go_on(demo):
    def fail(state):
        raise ZeroDivisionError

    batch = Batch(demo)
    good = batch.add(PROMPTS[0], max_tokens=8)
    bad = [batch.add(PROMPTS[row], sampler=failing_at(count)) for row, count in ((1, 1), (2, 4))]
    bad.append(batch.add(PROMPTS[3], checkpoints=fail, ends=[5]))
    ending = batch.add(PROMPTS[4], max_tokens=3, sampler=failing_at(4))  # the choice that nobody waits for
    events = run(batch)
    assert_as_alone([good, ending], events, [alone(demo, PROMPTS[0], 8), alone(demo, PROMPTS[4], 3)], 1e-3)
    assert {event.row for event in events if isinstance(event.error, ZeroDivisionError)} == set(bad)
    assert [len(row.tokens) - row.prompt_tokens for row in bad] == [0, 3, 0]
    for row, offset in zip(bad, (1, 26, 5)):
        assert row.following is None
        assert_goes_on(demo, row.tokens[:offset], row.state)


@pytest.fixture
def large_buffers(monkeypatch):
    """Caches as large as those of thousands of tokens."""
    monkeypatch.setattr(KVState, "FIRST", 4096)


def test_memory_is_checked_before_it_is_taken(demo, large_buffers):
    batch = Batch(demo, prefill_step=8)
    rows = [batch.add(prompt(1, 30), max_tokens=5)]
    run(batch, 6)
    before = held()
    need = budget.estimate_rows(demo, demo.make_cache(), 3, 35, batch.state.nbytes, 8)
    batch.memory_limit = limit = need.total + 1000
    for _ in range(2):
        rows.append(batch.add(prompt(2, 30), max_tokens=5))
    with pytest.raises(MemoryLimitError, match="answering 4 requests of up to 35 tokens"):
        batch.add(prompt(2, 30), max_tokens=5)
    with pytest.raises(MemoryLimitError):
        batch.add([1], max_tokens=9000)
    assert batch.waiting == rows[1:] and held() == before
    mx.reset_peak_memory()
    run(batch)
    assert mx.get_peak_memory() < limit


def test_an_endless_answer_ends_where_memory_does(demo, monkeypatch):
    monkeypatch.setattr("mlx_linattn.engine.batch.HOUSEKEEPING", 6)
    batch = Batch(demo, memory_limit=float("inf"))
    rows = [batch.add(PROMPTS[row], max_tokens=limit) for row, limit in ((0, -1), (2, 12), (3, -1))]
    events = run(batch, 8)
    batch.memory_limit = 1
    events += run(batch)
    failed = [event for event in events if event.error]
    assert [event.row for event in failed] == [rows[2], rows[0]], "the longest first, and never one that has a limit"
    assert all(isinstance(event.error, MemoryLimitError) for event in failed)
    for row in rows:
        assert_goes_on(demo, row.tokens, row.state)


def test_nothing_is_held_once_rows_are_gone(demo):
    def once():
        batch = Batch(demo, max_rows=3, prefill_step=16)
        kept = [batch.add(prompt(row, 10 + 15 * row), max_tokens=4) for row in range(5)]
        run(batch, 7)
        batch.remove(batch.rows[0])
        run(batch)
        return batch, kept

    once()
    before = held()
    batch, rows = once()
    states = sum(row.state.nbytes for row in rows)
    tokens = 4096  # the batch's empty list of next tokens and the like
    assert abs(held() - before - states) <= 0.02 * states + tokens
    del rows
    assert held() - before <= tokens
    assert batch.idle


def test_a_step_of_rows_of_different_lengths_copies_no_cache(demo, large_buffers):
    batch = Batch(demo)
    for row, length in enumerate((6, 3, 4)):
        batch.add(prompt(row, length))
    run(batch, 4)
    assert len(batch.rows) == 3
    kv = min(layer.nbytes for layer in batch.state if isinstance(layer, KVState))
    before = held()
    mx.reset_peak_memory()
    run(batch, 3)
    assert mx.get_peak_memory() - before < kv / 4


def test_eight_rows_cost_as_many_dispatches_as_one(demo):
    counts = {}
    for rows in (1, 8):
        batch = Batch(demo)
        for row in range(rows):
            batch.add(prompt(row, 5 + 3 * row))
        while batch.waiting:
            batch.step()
        tokens = mx.array([[9]] * rows)
        mx.eval(batch.state.arrays)
        counts[rows] = Dispatches("metal").count(lambda: [demo(tokens, batch.state), *batch.state.arrays])  # noqa: B023
    more = counts[8] - counts[1]
    # A row's place is a number of its own: four small arrays for all layers, and on a CPU one for the mask in each layer.
    attention = sum(isinstance(layer, KVState) for layer in batch.state)
    assert more.pop("ScatterAxis") == counts[1]["SliceUpdate"] - counts[8]["SliceUpdate"]
    assert more.pop("Select") == attention
    assert sum(more.values()) <= 4, more


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tokens": []}, "empty"),
        ({"tokens": [1], "max_tokens": 0}, "max_tokens is 0"),
        ({"tokens": [1], "max_tokens": -2}, "max_tokens is -2"),
    ],
)
def test_requests_that_make_no_sense_are_refused(demo, arguments, words):
    batch = Batch(demo)
    with pytest.raises(RequestError, match=words):
        batch.add(**arguments)
    assert batch.idle
    with pytest.raises(RequestError, match="max_rows is 0"):
        Batch(demo, max_rows=0)


def test_states_that_do_not_belong_are_refused(demo, fixture_folder):
    batch = Batch(demo)
    state = demo.make_cache()
    demo(mx.array([[1, 2, 3]]), state)
    with pytest.raises(RequestError, match="fewer tokens than the prompt's 3"):
        batch.add([1, 2, 3], state=state)
    pair = demo.make_cache()
    demo(mx.array([[1, 2], [3, 4]]), pair)
    with pytest.raises(RequestError, match="holds 2 rows"):
        batch.add([1, 2, 3], state=pair)
    with pytest.raises(StateError, match="keep their context differently"):
        batch.add([1, 2, 3, 4], state=demo.make_cache(KVOptions(kv_bits=8)))
    other = la.load_model(fixture_folder("mamba"))[0].make_cache()
    with pytest.raises(StateError, match="another model's"):
        batch.add([1, 2, 3, 4], state=other)
    assert batch.idle
