"""Session files: what was saved goes on as if it had never been away; whatever else lies there is refused in one sentence."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import pytest
from helpers import FIXTURES, assert_close, materialize
from toy_chat import ToyTokenizer

from mlx_linattn import Session
from mlx_linattn.errors import LinAttnError, RequestError, SessionFileError
from mlx_linattn.loading import load_model
from mlx_linattn.session import files
from mlx_linattn.state import KVOptions

OPTIONS = [{}, {"kv_bits": 8, "kv_group_size": 32}, {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": 20},
           {"max_kv_size": 12}]  # fmt: skip


def toy(model, **options) -> Session:
    return Session(model, ToyTokenizer(model.spec.vocab_size), system="w9 w10", **options)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(materialize(FIXTURES / "qwen3_next", tmp_path_factory.mktemp("m") / "m"), dtype="float32")[0]


@pytest.fixture(scope="module")
def demo():
    return load_model("demo")[0]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_loaded_session_goes_on_exactly(demo, options, tmp_path):
    chat = toy(demo, **options)
    for turn in range(3):
        chat.send(f"w{20 + turn} w30 w31", max_tokens=6)
    chat.undo()
    chat.save(tmp_path / "chat")
    back = Session.load(tmp_path / "chat", demo, chat.tokenizer)
    assert (back.messages, back.system, back.tokens) == (chat.messages, chat.system, chat.tokens)
    assert back.state.options == KVOptions(**options)
    probe = mx.array([[8]])
    got, want = (demo(probe, one.state.fork()).astype(mx.float32) for one in (back, chat))
    assert_close(got, want, 0.0)
    assert set(back.checkpoints) <= set(chat.checkpoints) and back.checkpoints
    back.redo()
    chat.redo()
    for one in (back, chat):
        one.retry(max_tokens=4)
    assert back.messages == chat.messages
    assert back.last.reused_tokens == chat.last.reused_tokens > 0


def test_random_sessions_survive_saving_at_any_moment(model, tmp_path):
    for seed in range(40):
        rng = random.Random(seed)
        chat = toy(model, checkpoint_bytes=rng.choice([0, 1 << 40]))
        for _ in range(rng.randint(0, 4)):
            chat.send(
                " ".join(f"w{rng.randrange(8, 80)}" for _ in range(rng.randint(1, 40))), max_tokens=rng.randint(1, 9)
            )
            if rng.random() < 0.3:
                chat.undo()
        chat.save(tmp_path / "chat")
        chat = Session.load(tmp_path / "chat", model, chat.tokenizer)
        if chat.tokens:
            want = model(mx.array([[*chat.tokens, 8]]))[:, -1]
            assert_close(model(mx.array([[8]]), chat.state.fork())[:, -1], want, 1e-4, f"seed {seed}")
        chat.send("w50", max_tokens=3)
        tokens = chat.tokens
        assert_close(model(mx.array([[8]]), chat.state.fork())[:, -1], model(mx.array([[*tokens, 8]]))[:, -1], 1e-4)


def test_any_damage_is_one_clear_error_and_loads_nothing(model, tmp_path):
    chat = toy(model)
    chat.send("w20 w21 w22", max_tokens=5)
    path = tmp_path / "chat"
    chat.save(path)
    whole = path.read_bytes()
    rng = random.Random(7)
    header = int.from_bytes(whole[:8], "little")
    recovered = 0
    for trial in range(150):
        at = rng.choice(
            [rng.randrange(8), rng.randrange(8, header), rng.randrange(len(whole)), rng.randrange(len(whole))]
        )
        if trial % 3:
            damaged = bytearray(whole)
            damaged[at] ^= 1 << rng.randrange(8)
        else:
            damaged = whole[:at]
        path.write_bytes(damaged)
        with pytest.raises(SessionFileError) as error:
            Session.load(path, model, chat.tokenizer)
        assert str(path) in str(error.value) and "\n" not in str(error.value)
        if "state=False" in str(error.value):
            recovered += 1
            assert Session.load(path, model, chat.tokenizer, state=False).messages == chat.messages
    assert recovered > 30


def test_files_of_others_are_refused_but_messages_can_be_had(model, demo, tmp_path):
    chat = toy(model)
    chat.send("w20 w21", max_tokens=5)
    path = tmp_path / "chat"
    chat.save(path)
    tokenizer = ToyTokenizer(demo.spec.vocab_size)
    with pytest.raises(SessionFileError, match="another model or quantization"):
        Session.load(path, demo, chat.tokenizer)
    with pytest.raises(SessionFileError, match="another tokenizer or chat template"):
        Session.load(path, model, tokenizer)
    moved = Session.load(path, demo, tokenizer, state=False)
    assert moved.messages == chat.messages and moved.tokens == []
    moved.send("w8", max_tokens=2)
    other, _ = load_model(materialize(FIXTURES / "qwen3_next", tmp_path / "m"), dtype="float32")
    Session.load(path, other, chat.tokenizer)
    other.layers[0].mlp_norm.weight = other.layers[0].mlp_norm.weight * 1.01
    with pytest.raises(SessionFileError, match="another model"):
        Session.load(path, other, chat.tokenizer)


def test_a_newer_version_and_strange_files_are_refused(model, tmp_path, monkeypatch):
    chat = toy(model)
    path = tmp_path / "chat"
    monkeypatch.setattr(files, "KIND", files.Kind("session", 2))
    chat.save(path)
    monkeypatch.undo()
    with pytest.raises(SessionFileError, match="newer version"):
        Session.load(path, model, chat.tokenizer)
    mx.save_safetensors(str(tmp_path / "x.safetensors"), {"a": mx.zeros(3)}, {"format": "mlx", "version": "1"})
    for name, words in (
        ("missing", "cannot be read"),
        ("x.safetensors", "not a session file"),
        (".", "cannot be read"),
    ):
        with pytest.raises(SessionFileError, match=words):
            Session.load(tmp_path / name, model, chat.tokenizer)
    with pytest.raises(SessionFileError, match="cannot be written"):
        chat.save(tmp_path / "no folder" / "chat")


def test_what_json_cannot_hold_is_refused_and_the_old_file_stays(model, tmp_path):
    chat = toy(model)
    path = tmp_path / "chat"
    chat.save(path)
    before = path.read_bytes()
    chat.messages = [{"role": "user", "content": object()}]
    with pytest.raises(RequestError, match="JSON"):
        chat.save(path)
    assert path.read_bytes() == before


def test_a_failure_while_writing_leaves_the_old_file_alone(model, tmp_path, monkeypatch):
    chat = toy(model)
    chat.send("w20", max_tokens=3)
    path = tmp_path / "chat"
    chat.save(path)
    before = path.read_bytes()
    chat.send("w21", max_tokens=3)
    for broken in ("os.replace", "os.fsync"):
        monkeypatch.setattr(
            f"mlx_linattn.session.archive.{broken}", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left"))
        )
        with pytest.raises(SessionFileError, match="No space left"):
            chat.save(path)
        monkeypatch.undo()
        assert path.read_bytes() == before
        assert list(tmp_path.iterdir()) == [path], "a half-written file was left behind"


def test_the_file_is_about_as_large_as_the_state(model, tmp_path):
    chat = toy(model, checkpoint_bytes=0, max_kv_size=12)
    sizes = []
    for _ in range(2):
        for _ in range(3):
            chat.send("w20 w21", max_tokens=3)
        chat.save(tmp_path / "chat")
        sizes.append((tmp_path / "chat").stat().st_size)
    assert sizes[1] < sizes[0] + 1500, "a bounded state's file grew by more than its messages"
    assert sizes[1] < chat.state.nbytes + 9000


CHILD = """
import sys
sys.path[:0] = sys.argv[1:2]
from helpers import FIXTURES, materialize
from toy_chat import ToyTokenizer
from pathlib import Path
from mlx_linattn import Session
from mlx_linattn.loading import load_model
folder = Path(sys.argv[2])
model, _ = load_model(materialize(FIXTURES / "qwen3_next", folder / "child"), dtype="float32")
chat = Session(model, ToyTokenizer(model.spec.vocab_size))
for i in range(100000):
    if i < 8:
        chat.send(" ".join(["w20"] * 40), max_tokens=2)
        chat.system = f"w{20 + i}"
    chat.system = f"w{20 + i % 50}"
    chat.save(folder / "chat")
    if i == 0:
        print("saved", flush=True)
"""


def test_a_kill_at_any_moment_leaves_a_whole_file(model, tmp_path):
    tests = str(Path(__file__).parents[1])
    for seed in range(3):
        child = subprocess.Popen([sys.executable, "-c", CHILD, tests, str(tmp_path)], stdout=subprocess.PIPE)
        assert child.stdout.readline() == b"saved\n"
        time.sleep(random.Random(seed).uniform(0.05, 0.7))
        child.send_signal(signal.SIGKILL)
        child.wait()
        chat = Session.load(tmp_path / "chat", model, ToyTokenizer(model.spec.vocab_size))
        assert len(chat.messages) >= 2
        want = model(mx.array([[*chat.tokens, 8]]))[:, -1]
        assert_close(model(mx.array([[8]]), chat.state.fork())[:, -1], want, 1e-4)
    chat.save(tmp_path / "chat")
    assert not list(tmp_path.glob(".*.partial")), "half-written files of killed processes stay"


def test_saving_during_a_turn_is_refused(model, tmp_path):
    chat = toy(model)
    stream = chat.stream("w20", max_tokens=5)
    next(stream)
    with pytest.raises(LinAttnError, match="a turn is running"):
        chat.save(tmp_path / "chat")
    stream.close()
    chat.save(tmp_path / "chat")
