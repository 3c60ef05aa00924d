"""What a Session promises to those who call it, beside what tests/session/test_scripts.py checks."""

from __future__ import annotations

import gc
import threading

import mlx.core as mx
import pytest
from helpers import FIXTURES, assert_close, materialize
from toy_chat import END, ToyTokenizer

from mlx_linattn import Session, load
from mlx_linattn.errors import MemoryLimitError, RequestError
from mlx_linattn.loading import load_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(materialize(FIXTURES / "qwen3_5", tmp_path_factory.mktemp("m") / "m"), dtype="float32")[0]


@pytest.fixture
def chat(model):
    return Session(model, ToyTokenizer(model.spec.vocab_size), system="w9 w10")


@pytest.fixture(scope="module")
def demo():
    return load("demo", dtype="float32")


def holds_what_it_says(chat) -> None:
    assert chat.state.offset == len(chat.tokens)
    if chat.tokens:
        want = chat.model(mx.array([[*chat.tokens, 8]]))[:, -1]
        assert_close(chat.model(mx.array([[8]]), chat.state.fork())[:, -1], want, 1e-4)


def test_undo_and_redo_cost_nothing(chat):
    for word in ("w20", "w21", "w22"):
        chat.send(word, max_tokens=4)
    messages = list(chat.messages)
    assert [m["content"] for m in chat.undo(2) if m["role"] == "user"] == ["w21", "w22"]
    assert chat.messages == messages[:2]
    chat.redo()
    assert chat.messages == messages
    held = len(chat.tokens)
    chat.send("w23", max_tokens=1)
    assert chat.last.reused_tokens >= held - 1
    with pytest.raises(RequestError, match="nothing to redo"):
        chat.redo()
    with pytest.raises(RequestError, match="cannot undo 9 turns"):
        chat.undo(9)


def test_redo_is_gone_once_the_conversation_went_on(chat):
    chat.send("w20", max_tokens=2)
    chat.undo()
    chat.send("w21", max_tokens=2)
    with pytest.raises(RequestError, match="nothing to redo"):
        chat.redo()


def test_an_undone_turn_takes_its_tool_results_along(chat):
    chat.send("w20", max_tokens=2)
    chat.send({"role": "tool", "content": "w30"}, max_tokens=2)
    assert [m["role"] for m in chat.messages] == ["user", "assistant", "tool", "assistant"]
    assert chat.last.reused_tokens >= 8
    assert len(chat.undo()) == 4 and chat.messages == []


def test_continue_goes_on_where_an_answer_was_cut(demo):
    model, tokenizer = demo
    whole = Session(model, tokenizer)
    want = whole.send("My sister's locker code is 4821.")
    cut = Session(model, tokenizer)
    first = cut.send("My sister's locker code is 4821.", max_tokens=4)
    assert first != want
    more = cut.continue_()
    assert first + more == want == cut.messages[-1]["content"]
    assert cut.last.prefilled_tokens == 1
    cut.edit(-1, want[:20])
    assert want[:20] + cut.continue_() == want, "an edited answer is continued with its spaces"


def test_a_question_can_be_edited_and_asked_again(demo):
    model, tokenizer = demo
    chat = Session(model, tokenizer)
    chat.send("My dog is called Pepper.")
    chat.send("What is my dog's name?")
    chat.edit(0, "My dog is called Biscuit.")
    assert len(chat.messages) == 1
    assert "Biscuit" in chat.send()
    with pytest.raises(RequestError, match="ends with an answer"):
        chat.send()
    with pytest.raises(RequestError, match="no message 7"):
        chat.edit(7, "x")


def test_thinking_is_kept_apart_and_left_out_of_the_next_prompt(demo):
    model, tokenizer = demo
    chat = Session(model, tokenizer, enable_thinking=True)
    chat.send("My dog is called Pepper.")
    assert chat.messages[-1]["reasoning_content"] and "think" not in chat.messages[-1]["content"]
    before = chat.last.prompt_tokens
    assert "Pepper" in chat.send("What is my dog's name?")
    assert before - 8 <= chat.last.reused_tokens < len(chat.tokens), "nothing before the first thought is read again"


def test_forks_answer_for_themselves(demo):
    model, tokenizer = demo
    chat = Session(model, tokenizer)
    chat.send("My dog is called Pepper.")
    twin = chat.fork()
    twin.send("Actually, my dog is called Rex.")
    assert "Rex" in twin.send("What is my dog's name?")
    assert "Pepper" in chat.send("What is my dog's name?")
    assert len(chat.messages) == 4 and len(twin.messages) == 6


def test_cancel_from_another_thread_keeps_what_there_is(chat):
    started = threading.Event()

    def stop():
        started.wait()
        chat.cancel()

    thread = threading.Thread(target=stop)
    thread.start()
    pieces = []
    for piece in chat.stream("w20 w21", sampler=lambda logprobs: mx.array([30])):  # never ends by itself
        pieces.append(piece)
        if len(pieces) == 3:
            started.set()
    thread.join()
    assert pieces[-1].response.finish_reason == chat.last.finish_reason == "cancel"
    assert chat.messages[-1]["content"] == "".join(piece.text for piece in pieces)
    holds_what_it_says(chat)


def test_cancel_while_reading_stops_at_the_next_piece(chat):
    def progress(done, total):
        if done >= 8:
            chat.cancel()

    pieces = list(chat.stream(" ".join(["w20"] * 60), progress=progress, prefill_step_size=4))
    assert [piece.response.finish_reason for piece in pieces] == ["cancel"]
    assert chat.messages == [] and 0 < len(chat.tokens) < 60
    holds_what_it_says(chat)
    chat.send("w20", max_tokens=1)  # a cancel is spent on the turn it hits


def test_a_turn_in_each_of_several_threads_is_the_conversation_of_one(model):
    def ask(chat, word):
        chat.send(word, max_tokens=4)

    here, there = (Session(model, ToyTokenizer(model.spec.vocab_size)) for _ in range(2))
    for word in ("w20", "w21 w22", "w23"):
        ask(here, word)
        thread = threading.Thread(target=ask, args=(there, word))
        thread.start()
        thread.join()
    assert here.messages == there.messages and len(here.messages) == 6


def test_two_turns_at_a_time_are_refused(chat):
    stream = chat.stream("w20", max_tokens=9)
    next(stream)
    with pytest.raises(RequestError, match="a turn is running"):
        chat.send("w21")
    stream.close()
    chat.send("w21", max_tokens=1)


def test_an_error_inside_the_model_leaves_the_conversation_alone(chat, monkeypatch):
    chat.send("w20", max_tokens=3)
    messages = list(chat.messages)
    layer = type(chat.model.layers[0])
    whole, calls = layer.__call__, 0

    def broken(self, *arguments):
        nonlocal calls
        calls += 1
        if calls == 7:
            raise ValueError("broken")
        return whole(self, *arguments)

    monkeypatch.setattr(layer, "__call__", broken)
    with pytest.raises(ValueError, match="broken"):
        chat.send("w21 w22", max_tokens=8)
    monkeypatch.undo()
    assert chat.messages == messages
    holds_what_it_says(chat)


def test_a_prompt_beyond_the_memory_limit_is_refused_before_anything_is_allocated(chat):
    chat.send("w20", max_tokens=1)
    messages, active = list(chat.messages), mx.get_active_memory()
    chat.memory_limit = active + 300_000
    with pytest.raises(MemoryLimitError, match=r"reading [\d,]+ tokens needs .* memory_limit"):
        chat.send(" ".join(["w20"] * 4000), max_tokens=1)
    assert mx.get_active_memory() <= active and chat.messages == messages
    chat.memory_limit = float("inf")
    chat.send(" ".join(["w20"] * 40), max_tokens=1)
    holds_what_it_says(chat)


def test_memory_stays_what_the_session_says_over_hundreds_of_turns(model):
    chat = Session(model, ToyTokenizer(model.spec.vocab_size), checkpoint_bytes=300_000, max_kv_size=32)
    mx.eval(model.parameters())
    chat.send("w20", max_tokens=2)

    def excess() -> int:
        gc.collect()
        mx.clear_cache()
        return mx.get_active_memory() - chat.state.nbytes - chat.checkpoint_nbytes

    base, found = excess(), []
    for turn in range(220):
        if turn % 10 == 9:
            chat.undo(2)
            chat.retry(max_tokens=2)
        elif turn % 60 == 51:
            chat.clear()
        else:
            chat.send(f"w{20 + turn % 50}", max_tokens=2, sampler=lambda logprobs: mx.array([END]))
        chat.messages = chat.messages[-8:]
        if turn % 20 == 0:
            found.append(excess() - base)
    # The newest checkpoint and the state may be the same arrays, so the sum may say more than there is.
    assert max(found) <= 16_384, found
    assert chat.checkpoint_nbytes <= 300_000
