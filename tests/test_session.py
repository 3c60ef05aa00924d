"""A conversation reads each token once, and is what a fresh reading of the same messages would be."""

import mlx.core as mx
import numpy as np
import pytest

import mlx_linattn as la
from mlx_linattn.errors import TokenizerError


@pytest.fixture(scope="module")
def demo():
    return la.load("demo", dtype="float32")


@pytest.fixture
def chat(demo):
    return la.Session(*demo)


def tokens_agree(session, model):
    """The state answers as a fresh state that reads the same tokens does."""
    timeline = session._timeline
    assert session.state.offset == len(timeline.tokens)
    snapshot = session.state.snapshot()
    here = model(mx.array([[7]]), session.state)[:, -1]
    session.state.restore(snapshot)
    fresh = model(mx.array([[*timeline.tokens, 7]]))[:, -1]
    np.testing.assert_allclose(np.array(here), np.array(fresh), atol=2e-3)


def test_it_remembers_and_reuses(chat, demo):
    assert chat.send("My dog is called Pepper.") == "Noted: your dog's name is Pepper."
    assert chat.last.reused_tokens == 0
    assert chat.send("My cat is called Momo.") == "Noted: your cat's name is Momo."
    assert chat.send("What is my dog's name?") == "Your dog's name is Pepper."
    assert chat.last.reused_tokens > chat.last.prompt_tokens // 2
    tokens_agree(chat, demo[0])
    assert [message["role"] for message in chat.messages] == ["user", "assistant"] * 3


def test_reasoning_is_told_apart_and_left_out_of_later_prompts(demo):
    chat = la.Session(*demo, enable_thinking=True)
    pieces = list(chat.stream("My dog is called Pepper."))
    assert {piece.kind for piece in pieces} == {"reasoning", "text"}
    assert "".join(piece.text for piece in pieces if piece.kind == "text") == "Noted: your dog's name is Pepper."
    assert all("think>" not in piece.text for piece in pieces)
    assert chat.messages[-1]["reasoning_content"]
    assert chat.send("What is my dog's name?") == "Your dog's name is Pepper."
    assert chat.last.reused_tokens > 0
    tokens_agree(chat, demo[0])


def test_leaving_the_stream_early_keeps_the_partial_answer(chat, demo):
    for index, _ in enumerate(chat.stream("My dog is called Pepper.")):
        if index == 2:
            break
    assert chat.messages[-1]["content"] == "Noted: your"
    tokens_agree(chat, demo[0])
    assert chat.send("My cat is called Momo.") == "Noted: your cat's name is Momo."


def test_an_error_while_reading_leaves_the_conversation_as_it_was(chat, demo):
    chat.send("My dog is called Pepper.")
    messages = list(chat.messages)

    def fail(done, total):
        if done:
            raise RuntimeError("the caller's own")

    with pytest.raises(RuntimeError, match="own"):
        list(chat.stream("My cat is called Momo. " * 10, progress=fail, prefill_step_size=16))
    assert chat.messages == messages
    tokens_agree(chat, demo[0])
    assert chat.send("What is my dog's name?") == "Your dog's name is Pepper."


def test_clearing_keeps_the_system_prompt_read(demo):
    chat = la.Session(*demo, system="You are kind.")
    chat.send("My dog is called Pepper.")
    chat.clear()
    assert chat.send("What is my dog's name?") == "I don't have that."
    assert chat.last.reused_tokens > 0


def test_a_base_model_is_refused(demo):
    class NoTemplate:
        has_chat_template = False

    with pytest.raises(TokenizerError, match="no chat template"):
        la.Session(demo[0], NoTemplate())
