"""Kept prefixes give the states that reading from the beginning gives, and hold the bytes that they say."""

from __future__ import annotations

import mlx.core as mx
import pytest
from helpers import FIXTURES, assert_close, held, materialize
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_chat import ToyTokenizer

from mlx_linattn.engine.prefix_files import PrefixFolder, _name
from mlx_linattn.engine.prefixes import Node, Prefixes
from mlx_linattn.loading import load_model
from mlx_linattn.state import KVOptions

KINDS = {
    "growing": KVOptions(),
    "quantized": KVOptions(kv_bits=8, kv_group_size=32),
    "quantized later": KVOptions(kv_bits=4, kv_group_size=32, quantized_kv_start=5),
    "bounded": KVOptions(max_kv_size=6),
}
LARGE = 1 << 40
IDS = [8 + (i * i * 3) % 77 for i in range(90)]
paths = st.lists(st.integers(8, 10), min_size=1, max_size=14)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(materialize(FIXTURES / "qwen3_5", tmp_path_factory.mktemp("m") / "m"), dtype="float32")[0]


@pytest.fixture(params=list(KINDS))
def options(request):
    return KINDS[request.param]


def read(model, ids, options, state=None):
    """The state after ``ids``, and the logits after the last of them."""
    state = model.make_cache(options) if state is None else state
    logits = model(mx.array([list(ids)]), state)[:, -1]
    mx.eval(logits, state.arrays)
    return state, logits


def test_the_longest_proper_prefix_is_found(model, options):
    store = Prefixes(model, options, LARGE)
    for length in (3, 9, 20):
        store.insert(IDS[:length], read(model, IDS[:length], options)[0])
    for asked, want in ((IDS[:30], 20), (IDS[:20], 9), (IDS[:15], 9), ([*IDS[:9], 7], 9), (IDS[:3], 0), ([7], 0)):
        state = store.find(asked).state
        assert (state.offset if state else 0) == want
        if state:
            same = read(model, asked[:want], options)[0]
            got = read(model, asked[want:], options, state)[1]
            assert_close(got, read(model, asked[want:], options, same)[1], 1e-5)
    assert (store.hits, store.lookups) == (4, 6)


def test_two_that_begin_alike_share_memory_and_a_third_finds_where_they_part(model, options):
    store = Prefixes(model, options, LARGE)
    left, right = IDS[:40], [*IDS[:30], *IDS[50:60]]
    alone = []
    for ids in (left, right):
        single = Prefixes(model, options, LARGE)
        single.insert(ids, read(model, ids, options)[0])
        alone.append(single.nbytes)
        assert store.find(ids).parting == (0 if ids is left else 30)
        store.insert(ids, read(model, ids, options)[0])
    shared = read(model, IDS[:30], options)[0]
    columns = sum(array.nbytes for piece in shared.cut(0, 30) for array in piece.arrays)
    assert store.nbytes == sum(alone) - columns
    assert store.find([*IDS[:35], 7]).state is None, "there is no checkpoint where they part"
    store.insert(IDS[:30], shared)
    assert store.find([*IDS[:35], 7]).state.offset == 30


def test_a_found_state_reads_on_without_touching_what_is_kept(model, options):
    store = Prefixes(model, options, LARGE)
    store.insert(IDS[:20], read(model, IDS[:20], options)[0])
    for _ in range(2):
        state = store.find(IDS[:30]).state
        got = [read(model, IDS[20:30], options, state)[1], read(model, IDS[30:40], options, state)[1]]
        same = read(model, IDS[20:30], options, read(model, IDS[:20], options)[0])[0]
        assert_close(got[1], read(model, IDS[30:40], options, same)[1], 1e-5)


def test_memory_is_what_it_says(model, options):
    before = held()
    store = Prefixes(model, options, LARGE)
    for length in (200, 300, 150, 330):
        ids = IDS * 4
        state = read(model, ids[:length], options)[0]
        store.insert(ids[:length], state)
    state = read(model, [*ids[:170], 3], options)[0]
    store.insert([*ids[:170], 3], state)
    del state
    assert held() - before == pytest.approx(store.nbytes, rel=0.2), "small arrays are rounded up"
    store.shrink(0)
    assert store.nbytes == 0 and held() == before


def test_the_checkpoint_that_was_used_longest_ago_goes_first(model):
    options = KVOptions()
    store = Prefixes(model, options, LARGE)
    paths = [[first, *IDS[:20]] for first in (1, 2, 3)]
    for path in paths:
        store.insert(path, read(model, path, options)[0])
    assert store.find([*paths[0], 9]).state
    store.shrink(store.nbytes - 1)
    assert [store.find([*path, 9]).state is not None for path in paths] == [True, False, True]
    size = store.nbytes // 2
    store.room = size // 2
    store.insert(paths[1], read(model, paths[1], options)[0])
    assert store.find([*paths[1], 9]).state is None, "what is larger than all the room takes nobody's place"
    assert store.nbytes == 2 * size


def test_a_long_conversation_keeps_its_end_and_its_system_prompt(model):
    options = KVOptions()
    state = read(model, IDS[:10], options)[0]
    store = Prefixes(model, options, 5 * state.recurrent_nbytes + 80 * state.kv_nbytes // 256)
    ids: list[int] = []
    for part in range(8):
        if part:
            found = store.find([*ids, 7]).state
            assert found.offset == len(ids)
        ids += IDS[part * 10 : part * 10 + 10]
        store.insert(ids, read(model, ids, options)[0])
    assert store.nbytes <= store.room
    assert store.find([*IDS[:10], 7]).state.offset == 10


# On disk


def on_disk(model, options, folder, room=LARGE) -> Prefixes:
    """A store with what the folder holds, and a function that writes it."""
    store = Prefixes(model, options, room)
    files = PrefixFolder(folder, store, model, ToyTokenizer(88), options)
    files.load()
    store.write = lambda: sum(1 for _ in files.update())
    return store


def test_prefixes_survive_a_restart(model, options, tmp_path):
    store = on_disk(model, options, tmp_path)
    branches = IDS[:40], [*IDS[:30], *IDS[50:60]], IDS[:30], IDS[:70]
    for ids in branches:
        store.insert(ids, read(model, ids, options)[0])
        store.write()
    assert store.write() == 0, "what is written is not written again"
    again = on_disk(model, options, tmp_path)
    assert (again.nbytes, len(list(again.nodes()))) == (store.nbytes, len(list(store.nodes())))
    for ids in branches:
        want, got = (read(model, [5, 6], options, one.find([*ids, 5, 6]).state) for one in (store, again))
        assert got[0].offset == len(ids) + 2
        assert_close(got[1], want[1], 0.0)
    again.shrink(again.nbytes // 2)
    again.write()
    third = on_disk(model, options, tmp_path)
    assert third.nbytes == again.nbytes > 0
    third.shrink(0)
    third.write()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_the_files_are_private_and_one_models(model, tmp_path):
    store = on_disk(model, KVOptions(), tmp_path / "kept")
    store.insert(IDS[:20], read(model, IDS[:20], KVOptions())[0])
    store.write()
    (folder,) = (tmp_path / "kept").iterdir()
    (file,) = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
    assert on_disk(model, KVOptions(max_kv_size=9), tmp_path / "kept").find(IDS).state is None
    other = load_model(materialize(FIXTURES / "jamba", tmp_path / "jamba"), dtype="float32")[0]
    assert on_disk(other, KVOptions(), tmp_path / "kept").find(IDS).state is None
    assert file.exists(), "another model's files are left alone"


@pytest.mark.parametrize("harm", ["cut off", "changed", "empty", "missing", "foreign"])
def test_damaged_files_are_left_out_with_a_line_in_the_log(model, tmp_path, caplog, harm):
    store = on_disk(model, KVOptions(), tmp_path)
    for ids in (IDS[:10], IDS[:20], IDS[:30]):
        store.insert(ids, read(model, ids, KVOptions())[0])
    store.write()
    middle = next(node for node in store.nodes() if node.end == 20)
    file = next(path for path in tmp_path.rglob("*.safetensors") if path.stem == _name(IDS[:20]))
    data = bytearray(file.read_bytes())
    if harm == "cut off":
        file.write_bytes(data[:-100])
    elif harm == "changed":
        data[-50] ^= 1
        file.write_bytes(data)
    elif harm == "empty":
        file.write_bytes(b"")
    elif harm == "missing":
        file.unlink()
    else:
        mx.save_safetensors(str(file), {"a": mx.zeros((3,))})
    assert middle.checkpoint is not None
    again = on_disk(model, KVOptions(), tmp_path)
    assert again.find(IDS).state.offset == 10, "and what goes on from it is of no use either"
    assert "a kept prefix is left out" in caplog.text
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1
    got = read(model, IDS[10:40], KVOptions(), again.find(IDS).state)[1]
    assert_close(got, read(model, IDS[:40], KVOptions())[1], 1e-4)


def test_the_disk_holds_no_more_than_memory_may(model, tmp_path):
    store = on_disk(model, KVOptions(), tmp_path)
    for first in range(8, 16):
        ids = [first, *IDS[:20]]
        store.insert(ids, read(model, ids, KVOptions())[0])
    store.write()
    room = store.nbytes // 2
    small = on_disk(model, KVOptions(), tmp_path, room)
    assert 0 < small.nbytes <= room
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors")) <= room


def test_a_full_disk_costs_the_files_and_nothing_else(model, tmp_path, monkeypatch, caplog):
    store = on_disk(model, KVOptions(), tmp_path)
    store.insert(IDS[:20], read(model, IDS[:20], KVOptions())[0])
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left")))
    store.write()
    assert "prefixes are not kept on disk any more" in caplog.text and "No space left" in caplog.text
    assert store.find(IDS).state.offset == 20
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear", "jamba", "recurrent_gemma"])
def test_every_kind_of_layer(family, tmp_path):
    model = load_model(materialize(FIXTURES / family, tmp_path / family), dtype="float32")[0]
    ids = [token % model.spec.vocab_size for token in IDS]
    for options in (KVOptions(), KVOptions(max_kv_size=6)):
        store = Prefixes(model, options, LARGE)
        for some in (ids[:20], [*ids[:12], 3, 4]):
            store.insert(some, read(model, some, options)[0])
        asked = [*ids[:20], 5, 6]
        got = read(model, asked[20:], options, store.find(asked).state)[1]
        assert_close(got, read(model, asked, options)[1], 2e-4)


@settings(max_examples=12)
@given(st.sampled_from(list(KINDS)), st.lists(st.tuples(paths, st.booleans()), max_size=12), st.integers(0, 3))
def test_whatever_comes_it_is_as_if_nothing_were_kept(model, kind, steps, size):
    options = KINDS[kind]
    one = read(model, IDS[:14], options)[0]
    room = LARGE if size == 3 else size * (one.recurrent_nbytes + one.kv_nbytes // 8)
    store, inserted = Prefixes(model, options, room), set()
    for ids, asks in steps:
        state = store.find(ids).state if asks else None
        longest = max(
            (len(key) for key in inserted if len(key) < len(ids) and tuple(ids[: len(key)]) == key), default=0
        )
        if asks and room == LARGE:
            assert (state.offset if state else 0) == longest
        if state:
            assert tuple(ids[: state.offset]) in inserted and state.offset <= longest
        done = state.offset if state else 0
        state, logits = read(model, ids[done:], options, state)
        assert_close(logits, read(model, ids, options)[1], 2e-4)
        store.insert(ids, state)
        inserted.add(tuple(ids))
        assert store.nbytes == sum(node.nbytes for node in store.nodes()) <= room


def test_a_conversation_can_have_thousands_of_turns():
    node = Node((), None, 0)
    for turn in range(5000):
        node = Node((turn,), node, turn + 1)
    assert [one.end for one in node.path] == list(range(1, 5001))
