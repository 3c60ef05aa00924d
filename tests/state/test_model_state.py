"""Snapshots, forks and the memory that a state really holds, for every kind of layer."""

from __future__ import annotations

import mlx.core as mx
import pytest
from helpers import assert_close, held

from mlx_linattn.errors import RequestError, StateError
from mlx_linattn.loading import load_model
from mlx_linattn.state import KVOptions, KVState, Span

KINDS = {
    "growing": KVOptions(),
    "quantized": KVOptions(kv_bits=8, kv_group_size=32),
    "quantized later": KVOptions(kv_bits=4, kv_group_size=32, quantized_kv_start=13),
    "bounded": KVOptions(max_kv_size=12),
}
IDS = [8 + (i * i * 3) % 77 for i in range(90)]


@pytest.fixture(scope="module")
def model():
    return load_model("demo", dtype="float32")[0]


@pytest.fixture(params=list(KINDS))
def options(request):
    return KINDS[request.param]


def read(model, state, ids):
    return model(mx.array([list(ids)]), state)[:, -1]


def test_a_restored_state_reads_on_as_if_nothing_had_been(model, options):
    state = model.make_cache(options)
    read(model, state, IDS[:20])
    snapshot = state.snapshot()
    want = read(model, state, IDS[20:33])
    for token in IDS[40:60]:
        read(model, state, [token])
    state.restore(snapshot)
    assert state.counts == (20,)
    assert_close(read(model, state, IDS[20:33]), want, 0.0)


def test_a_snapshot_does_not_grow_with_the_context(model):
    state = model.make_cache()
    read(model, state, IDS[:4])
    small = state.snapshot()
    read(model, state, IDS * 8)
    large = state.snapshot()
    assert small.nbytes == large.nbytes == state.recurrent_nbytes
    mx.eval(state.arrays)
    before = held()
    kept = [state.snapshot() for _ in range(50)]
    assert held() == before, "fifty snapshots of one moment take memory"
    del kept


def test_forks_do_not_see_each_other(model, options):
    state = model.make_cache(options)
    read(model, state, IDS[:20])
    mx.eval(state.arrays)
    twin = state.fork()
    assert held() - held() == 0
    left, right = [state, IDS[20:40]], [twin, IDS[50:70]]
    got = {id(side[0]): [read(model, side[0], [token]) for token in side[1]] for side in (left, right)}
    for side, ids in (left, right):
        fresh = model.make_cache(options)
        read(model, fresh, IDS[:20])
        for one, token in zip(got[id(side)], ids):
            assert_close(one, read(model, fresh, [token]), 1e-4)


def test_a_fork_takes_no_memory_until_it_reads(model, options):
    state = model.make_cache(options)
    read(model, state, IDS)
    mx.eval(state.arrays)
    before = held()
    twins = [state.fork() for _ in range(20)]
    assert held() == before
    del twins


def test_snapshots_serve_forks_and_each_goes_back_alone(model, options):
    state = model.make_cache(options)
    read(model, state, IDS[:10])
    early = state.snapshot()
    read(model, state, IDS[10:20])
    late = state.snapshot()
    twin = state.fork()
    twin.restore(early)
    read(model, twin, IDS[60:80])
    with pytest.raises(StateError, match="cannot restore"):
        twin.restore(late)
    want = model.make_cache(options)
    for ids in (IDS[:10], IDS[10:20]):  # the same pieces: a number that rounds the other way is stored as another one
        read(model, want, ids)
    state.restore(late)
    assert_close(read(model, state, [8]), read(model, want, [8]), 1e-4)


def test_nbytes_is_what_memory_holds_over_thousands_of_steps(fixture_folder):
    model, _ = load_model(fixture_folder("qwen3_next"), dtype="float32")
    token = mx.array([[8]])
    mx.eval(model.parameters())
    for options in (KVOptions(), KVOptions(max_kv_size=40)):
        empty = held()
        state = model.make_cache(options)
        for step in range(1, 2601):
            model.hidden_states(token, state)
            mx.eval(state.arrays)
            if step in (1, 500, 2600):
                growth = held() - empty
                assert abs(growth - state.nbytes) <= 0.02 * state.nbytes + 4096, (step, growth, state.nbytes)
        del state


def test_a_cache_that_goes_far_back_gives_its_memory_back(model):
    state = model.make_cache()
    read(model, state, IDS[:10])
    early = state.snapshot()
    for _ in range(12):
        model.hidden_states(mx.array([IDS]), state)
    large = state.kv_nbytes
    state.restore(early)
    mx.eval(state.arrays)
    assert state.kv_nbytes < large / 2
    want = model.make_cache()
    read(model, want, IDS[:10])
    assert_close(read(model, state, IDS[:5]), read(model, want, IDS[:5]), 1e-4)


def test_predicted_bytes_are_those_held(model, options):
    state = model.make_cache(options)
    read(model, state, [8])
    for tokens in (5, 300, 700):
        state.reserve(600)
        promised = state.nbytes_with(state.offset + tokens)
        for begin in range(0, tokens, 90):
            read(model, state, (IDS * 9)[begin : min(begin + 90, tokens)])
        if options == KINDS["growing"] or options.max_kv_size:
            assert state.nbytes == promised
        else:  # the buffers of scales start with a capacity of their own
            assert abs(state.nbytes - promised) <= 0.1 * promised


def test_buffers_grow_a_few_times_only():
    state, sizes = KVState(), set()
    for start in range(0, 20000, 100):
        x = mx.zeros((1, 1, 100, 2))
        state.append(Span((start,), (100,), 100), x, x)
        sizes.add(state.nbytes)
    assert len(sizes) <= 13


def test_growing_takes_no_more_than_the_old_and_the_new_buffer():
    state, tokens = KVState(), 8192
    state.append(Span((0,), (tokens,), tokens), mx.random.normal((1, 2, tokens, 64)))
    mx.eval(state.state)
    before = held()
    mx.reset_peak_memory()
    state.append(Span((tokens,), (1,), 1), mx.ones((1, 2, 1, 64)))
    mx.eval(state.state)
    assert mx.get_peak_memory() - before < 1.1 * state.nbytes


def test_a_prompt_that_fills_a_buffer_holds_nothing_else():
    state, before = KVState(), held()
    wide = mx.random.normal((1, 2, KVState.FIRST, 512))
    mx.eval(wide)
    state.append(Span((0,), (KVState.FIRST,), KVState.FIRST), wide[..., :16])
    mx.eval(state.state)
    del wide
    assert held() - before < 1.1 * state.nbytes


def test_an_eight_bit_cache_is_close_and_smaller(model):
    exact, packed = model.make_cache(), model.make_cache(KVOptions(kv_bits=8))
    a, b = read(model, exact, IDS), read(model, packed, IDS)
    assert packed.kv_nbytes < 0.3 * exact.kv_nbytes  # float32 to 8 bits and scales
    assert mx.abs(mx.softmax(a) - mx.softmax(b)).max().item() < 0.02


@pytest.mark.parametrize(
    "options, words",
    [
        ({"max_kv_size": 4}, "more than 4"),
        ({"kv_bits": 7}, "kv_bits is 7"),
        ({"kv_bits": 8, "kv_group_size": 16}, "kv_group_size is 16"),
        ({"kv_bits": 8, "max_kv_size": 99}, "cannot be combined"),
        ({"kv_bits": 8, "quantized_kv_start": -1}, "quantized_kv_start"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, words):
    with pytest.raises(RequestError, match=words):
        KVOptions(**options)


def test_a_group_that_does_not_divide_a_head_is_refused(fixture_folder):
    model, _ = load_model(fixture_folder("qwen3_5"), dtype="float32")
    state = model.make_cache(KVOptions(kv_bits=8, kv_group_size=128))
    with pytest.raises(RequestError, match="does not divide"):
        read(model, state, IDS[:3])
    assert state.counts == () and state.nbytes == 0


def test_a_layer_that_lost_or_skipped_tokens_is_noticed(model):
    state = model.make_cache()
    read(model, state, IDS[:9])
    layer = next(layer for layer in state if isinstance(layer, KVState))
    layer.length -= 1
    with pytest.raises(StateError, match="holds 8 tokens, but the state 9"):
        read(model, state, IDS[:2])
    layer.length += 1
    with state.advancing(state.span(1, 2, None)):
        pass  # no layer reads anything
    with pytest.raises(StateError, match="holds 9 tokens, but the state 11"):
        read(model, state, IDS[:2])


def test_rows_of_different_lengths_go_back_and_on(model, options):
    state, rows = model.make_cache(options), mx.array([IDS[:20], IDS[20:40]])
    model(rows, state, lengths=[20, 11])
    snapshot = state.snapshot()
    want = model(rows[:, :5], state, lengths=[3, 5])
    state.restore(snapshot)
    assert state.counts == (20, 11)
    assert_close(model(rows[:, :5], state, lengths=[3, 5])[1], want[1], 0.0)
    alone = model.make_cache(options)
    model(rows[1:, :11], alone)
    assert_close(model(rows[1:, :5], alone)[0], want[1], 1e-3 if options.kv_bits is None else 2.0)
