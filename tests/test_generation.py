"""Generation has mlx_lm's names, order and fields, and leaves state and tokens in agreement wherever it stops."""

import dataclasses

import mlx.core as mx
import numpy as np
import pytest
from helpers import held

import mlx_linattn as la
from mlx_linattn.errors import RequestError
from mlx_linattn.generation import begin
from mlx_linattn.interop.door import mlx_lm
from mlx_linattn.state import KVOptions, KVState, ModelState, Span, model_state


@pytest.fixture(scope="module")
def demo():
    return la.load("demo", dtype="float32")


def ask(tokenizer, text, **template):
    return tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, **template)


QUESTION = "My cat is called Momo. What is my cat's name?"


def test_the_demo_answers_from_what_it_was_told(demo):
    model, tokenizer = demo
    text = la.generate(model, tokenizer, ask(tokenizer, QUESTION), max_tokens=30)
    assert text == "Your cat's name is Momo."


def test_responses_have_mlx_lms_fields(demo):
    model, tokenizer = demo
    ours = [field.name for field in dataclasses.fields(la.GenerationResponse)]
    theirs = [field.name for field in dataclasses.fields(mlx_lm("generate").GenerationResponse)]
    assert ours[: len(theirs)] == theirs
    *_, last = la.stream_generate(model, tokenizer, ask(tokenizer, QUESTION), max_tokens=30)
    assert last.finish_reason == "stop"
    assert last.token in tokenizer.eos_token_ids
    assert last.prompt_tokens == len(ask(tokenizer, QUESTION))
    assert last.generation_tokens == len(tokenizer.encode("Your cat's name is Momo.")) + 1  # and the end token


def test_greedy_tokens_equal_stock_mlx_lms_generate_step(demo):
    """Our model in mlx_lm's own loop, and in ours: the same tokens."""
    model, tokenizer = demo
    prompt = ask(tokenizer, QUESTION)
    ours = [token for token, _ in la.generate_step(prompt, model, max_tokens=12)]
    theirs = mlx_lm("generate").generate_step(mx.array(prompt), model, max_tokens=12)
    assert ours == [token for token, _ in theirs]


@pytest.mark.parametrize("step", [1, 3, 16, 2048])
def test_prefill_in_pieces_changes_nothing(demo, step):
    model, tokenizer = demo
    prompt = ask(tokenizer, QUESTION)
    whole = model(mx.array(prompt)[None])[:, -1]
    calls = []
    state = model.make_cache()
    logits = la.generation.prefill(model, prompt, state, step, lambda done, total: calls.append((done, total)))
    np.testing.assert_allclose(np.array(logits), np.array(whole), atol=1e-3)
    assert state.offset == len(prompt)
    assert calls[0] == (0, len(prompt)) and calls[-1] == (len(prompt), len(prompt))
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_stopping_at_any_token_leaves_the_state_with_exactly_the_yielded_tokens(demo):
    model, tokenizer = demo
    prompt = ask(tokenizer, QUESTION)
    for stop in (1, 2, 5):
        state = model.make_cache()
        tokens = []
        for token, _ in la.generate_step(prompt, model, prompt_cache=state, max_tokens=20):
            tokens.append(token)
            if len(tokens) == stop:
                break
        assert state.offset == len(prompt) + stop
        going_on = [token for token, _ in la.generate_step([tokens[-1]], model, max_tokens=1)]
        assert going_on  # a state of its own, untouched by the other
        fresh = model(mx.array([*prompt, *tokens, 5])[None])[:, -1]
        here = model(mx.array([[5]]), state)[:, -1]
        np.testing.assert_allclose(np.array(here), np.array(fresh), atol=2e-3)


def test_a_length_limit_is_reported(demo):
    model, tokenizer = demo
    responses = list(la.stream_generate(model, tokenizer, ask(tokenizer, QUESTION), max_tokens=3))
    assert len(responses) == 3
    assert [r.finish_reason for r in responses] == [None, None, "length"]


def test_sampling_is_repeatable_with_a_seed(demo):
    model, tokenizer = demo
    sampler = la.make_sampler(temp=5.0)
    texts = []
    for seed in (1, 1, 2):
        mx.random.seed(seed)
        texts.append(la.generate(model, tokenizer, ask(tokenizer, QUESTION), max_tokens=12, sampler=sampler))
    assert texts[0] == texts[1] != texts[2]


def test_logits_processors_see_all_tokens_so_far(demo):
    model, tokenizer = demo
    prompt = ask(tokenizer, QUESTION)
    seen = []

    def forbid_first(tokens, logits):
        seen.append(tokens.tolist())
        return logits

    tokens = [t for t, _ in la.generate_step(prompt, model, max_tokens=3, logits_processors=[forbid_first])]
    assert seen[0] == prompt
    assert seen[2] == [*prompt, *tokens[:2]]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"draft_model": object()}, "draft_model"),
        ({"prefill_step_size": 0}, "prefill"),
    ],
)
def test_options_that_make_no_sense_are_refused(demo, options, word):
    model, tokenizer = demo
    with pytest.raises(RequestError, match=word):
        list(la.stream_generate(model, tokenizer, [1, 2], **options))


def test_an_empty_prompt_is_refused(demo):
    model, tokenizer = demo
    with pytest.raises(RequestError, match="empty"):
        la.generate(model, tokenizer, "")
    for shape in ((1, 0), (0, 3)):
        with pytest.raises(RequestError, match="at least one token"):
            model(mx.zeros(shape, mx.int32))


class TestThinkingSwitch:
    """The demo's template thinks when asked to, and not otherwise; mlx_lm's wrapper would turn it on by itself."""

    OFF = "<think>\n\n</think>\n\n"

    def test_off_by_default(self, demo):
        _, tokenizer = demo
        assert ask(tokenizer, "hi", tokenize=False).endswith(self.OFF)

    def test_both_positions(self, demo):
        _, tokenizer = demo
        assert ask(tokenizer, "hi", tokenize=False, enable_thinking=False).endswith(self.OFF)
        assert ask(tokenizer, "hi", tokenize=False, enable_thinking=True).endswith("<think>\n")

    def test_stock_mlx_lms_wrapper_obeys_it_too(self, demo):
        stock = mlx_lm("tokenizer_utils").load(la.loading.resolve("demo"))
        assert ask(stock, "hi", tokenize=False, enable_thinking=False).endswith(self.OFF)
        assert ask(stock, "hi", tokenize=False).endswith("<think>\n")

    def test_the_prompts_are_the_references(self, demo):
        from helpers import FIXTURES

        _, tokenizer = demo
        want = np.load(FIXTURES / "demo" / "golden.npz")
        for name in (f"prompt{i}" for i in range(4)):
            for thinking in (False, True):
                ids = want[f"{name}{'_thinking' * thinking}_ids"].ravel().tolist()
                text = tokenizer.decode(ids)
                assert text.endswith("<think>\n" if thinking else self.OFF)
                assert tokenizer.encode(text, add_special_tokens=False) == ids


def test_the_model_runs_in_another_thread_than_the_one_that_loaded_it(demo):
    import threading

    model, tokenizer = demo
    texts = []
    worker = threading.Thread(
        target=lambda: texts.append(la.generate(model, tokenizer, ask(tokenizer, QUESTION), max_tokens=30))
    )
    worker.start()
    worker.join(60)
    assert texts == ["Your cat's name is Momo."]


def test_a_large_cache_is_written_in_place_though_tokens_begin_ahead(monkeypatch):
    monkeypatch.setattr(model_state, "LARGE", 0)
    state, tokens, heads = ModelState([KVState()], KVOptions()), 40_000, 4
    (layer,) = state
    layer.append(Span((0,), (tokens,), tokens), *(mx.zeros((1, heads, tokens, 32)) for _ in range(2)))
    mx.eval(state.arrays)
    before, x = held(), mx.ones((1, heads, 1, 32))
    mx.reset_peak_memory()
    for place in range(tokens, tokens + 6):
        columns, _ = layer.append(Span((place,), (1,), 1), x * 0.5, x)
        last, x = x, mx.fast.scaled_dot_product_attention(x, *columns, scale=0.1)
        begin(x, state, last)
    mx.eval(x)
    assert mx.get_peak_memory() - before < layer.nbytes / 4
