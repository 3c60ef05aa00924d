"""The bundled demo model against reference numbers from transformers, in float32."""

from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from helpers import FIXTURES, assert_close

from mlx_linattn.loading import load_model
from mlx_linattn.state import KVOptions

END = (3069, 3067)  # <|im_end|>, <|endoftext|>
CLEAR = 0.01  # a lead of the best logit over the second that float32 arithmetic cannot overturn
PROMPTS = [f"prompt{i}{mode}" for i in range(4) for mode in ("", "_thinking")]


@pytest.fixture(scope="module")
def demo():
    model, _ = load_model("demo", dtype="float32")
    return model


@pytest.fixture(scope="module")
def golden():
    with np.load(FIXTURES / "demo" / "golden.npz") as arrays:
        return dict(arrays)


def answer_length(tokens, margins) -> int:
    """How many of the reference's greedy tokens bind: up to the end token, or to the first choice that was close."""
    for i, (token, margin) in enumerate(zip(tokens, margins)):
        if margin <= CLEAR:
            return i
        if token in END:
            return i + 1
    return len(tokens)


@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_answers_are_the_references(name, demo, golden):
    want = golden[f"{name}_greedy"]
    count = answer_length(want, golden[f"{name}_greedy_margin"])
    assert count >= 5, "the reference's answer binds nothing: the fixture is not what it should be"
    cache = demo.make_cache()
    logits = demo(golden[f"{name}_ids"][None], cache)[:, -1]
    assert_close(logits[0], golden[f"{name}_last_logits"], 1e-4, "last logits of the prompt")
    got = []
    for _ in range(count):
        token = mx.argmax(logits, axis=-1)
        got.append(token.item())
        logits = demo(token[:, None], cache)[:, -1]
    assert got == want[:count].tolist()


def test_logits_at_every_position_are_the_references(demo, golden):
    assert_close(demo(golden["short_ids"][None])[0], golden["short_logits"], 1e-4)


def test_last_hidden_states_are_the_references(demo, golden):
    assert_close(demo.hidden_states(mx.array(golden["mtp_ids"][None]))[0], golden["mtp_hidden"], 1e-4)


def test_bounded_attention_is_the_references_window_with_sinks(demo, golden):
    ids = golden["window16_sinks4_ids"]
    for sizes in ([108], [50, 1, 57], [3, 20, 85]):
        cache = demo.make_cache(KVOptions(max_kv_size=20))
        edges = np.cumsum([0, *sizes])
        logits = mx.concatenate([demo(ids[None, a:b], cache) for a, b in pairwise(edges)], axis=1)[0]
        assert_close(logits[-1], golden["window16_sinks4_last_logits"], 1e-4, f"pieces {sizes}")
        assert mx.argmax(logits, axis=-1).tolist() == golden["window16_sinks4_argmax"].tolist()
