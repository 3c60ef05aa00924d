"""Conversations on disk: private, resumed without reading again, and never lost with the state."""

import os
import stat
from functools import cache

import pytest

import mlx_linattn as la
from mlx_linattn.chat.sessions import KEPT_STATES, Record, Store, data_folder
from mlx_linattn.errors import SessionFileError


@cache
def demo():
    return la.load("demo")


@pytest.fixture
def kept(tmp_path):
    """A store with one conversation, and that conversation."""
    store, session = Store(tmp_path), la.Session(*demo())
    session.send("My dog is called Pepper.")
    store.write(Record("dogs", "demo", session.messages, named=True, read_tokens=10, read_seconds=1.0))
    store.write_state("dogs", session)
    return store, session


def test_a_conversation_goes_on_without_reading_again(kept):
    store, session = kept
    record, again, notice = store.load("dogs", *demo())
    assert notice == "" and record.model == "demo" and record.title == "My dog is called Pepper."
    assert again.messages == session.messages and again.tokens == session.tokens
    assert again.send("What is my dog's name?") == "Your dog's name is Pepper."
    assert again.last.reused_tokens > 0


def test_everything_is_for_its_owner_alone(kept):
    store, _ = kept
    for path in [store.folder, *store.folder.rglob("*")]:
        assert stat.S_IMODE(os.stat(path).st_mode) & 0o077 == 0, path


@pytest.mark.parametrize("damage", ["cut", "garbage", "gone"])
def test_messages_survive_a_damaged_state(kept, damage):
    store, session = kept
    state = store.path("dogs") / "state.safetensors"
    if damage == "gone":
        state.unlink()
    else:
        state.write_bytes(state.read_bytes()[:-1000] if damage == "cut" else b"garbage")
    _, again, notice = store.load("dogs", *demo())
    assert again.messages == session.messages and again.tokens == []
    assert bool(notice) == (damage != "gone") and "\n" not in notice
    assert again.send("What is my dog's name?") == "Your dog's name is Pepper."


def test_messages_survive_in_the_state_where_their_own_file_is_damaged(kept):
    store, session = kept
    (store.path("dogs") / "messages.json").write_text('{"messages": [')
    record, again, notice = store.load("dogs", *demo())
    assert again.messages == session.messages and record.name == "dogs"
    assert "damaged" in notice and "\n" not in notice


def test_messages_that_are_newer_than_the_state_are_the_truth(kept):
    store, session = kept
    record = store.read("dogs")
    record.messages = [*session.messages, {"role": "user", "content": "What is my dog's name?"}]
    store.write(record)
    _, again, _ = store.load("dogs", *demo())
    assert len(again.messages) == 3 and again.tokens == session.tokens


@pytest.mark.parametrize("text", ["", "[]", '{"messages": [1]}', '{"messages": 3}', "{"])
def test_damage_is_told_in_one_sentence(tmp_path, text):
    store = Store(tmp_path)
    store.path("x").mkdir(parents=True)
    (store.path("x") / "messages.json").write_text(text)
    with pytest.raises(SessionFileError, match="damaged"):
        store.load("x", *demo())


@pytest.mark.parametrize("name", ["", "..", ".hidden", "a/b", "a\\b", "a\nb", "x" * 101])
def test_names_stay_in_the_folder(tmp_path, name):
    with pytest.raises(SessionFileError, match="cannot name"):
        Store(tmp_path).path(name)


def test_the_latest_comes_first_and_old_unnamed_states_go(tmp_path):
    store = Store(tmp_path)
    names = [f"s{i}" for i in range(KEPT_STATES + 2)]
    for i, name in enumerate(names):
        store.write(Record(name, messages=[{"role": "user", "content": name}], named=i == 0))
        (store.path(name) / "state.safetensors").touch()
        os.utime(store.path(name) / "messages.json", (i, i))
    assert store.names() == names[::-1]
    store.remove_old_states()
    assert [name for name in names if not (store.path(name) / "state.safetensors").exists()] == ["s1"]


def test_where_data_lies(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.delenv("MLX_LINATTN_DATA", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert data_folder() == tmp_path / "mlx-linattn"
    monkeypatch.setattr("sys.platform", "darwin")
    assert data_folder().parts[-3:] == ("Library", "Application Support", "mlx-linattn")
    monkeypatch.setenv("MLX_LINATTN_DATA", str(tmp_path / "own"))
    assert data_folder() == tmp_path / "own"
