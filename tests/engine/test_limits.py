"""What is refused, what fails and what ends: whoever waits is told."""

from __future__ import annotations

import gc
import subprocess
import sys

import mlx.core as mx
import pytest
from threads import eventually, everyone

import mlx_linattn as la
from mlx_linattn import budget
from mlx_linattn.errors import BusyError, CheckpointError, ClosedError, MemoryLimitError, RequestError

PEPPER = "My dog is called Pepper. What is my dog's name?"
CODES = [f"The code is {4821 + 7 * i}. What is the code?" for i in range(4)]
WORDS = [f"w{20 + i} w30 w40" for i in range(4)]


def test_a_full_queue_is_said_at_once(endless):
    streams = [endless.submit(words) for words in WORDS]
    with pytest.raises(BusyError, match="2 answers and 2 more wait"):
        endless.submit(WORDS[0])
    eventually(lambda: endless.stats().rows == 2 and endless.stats().queue == 2)
    for stream in streams:
        stream.close()
    eventually(lambda: endless.stats().rows + endless.stats().queue == 0)
    assert endless.answer(WORDS[0], max_tokens=2).done.usage.completion_tokens == 2


@pytest.mark.parametrize(
    "fields, says",
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temp": -1.0}, "temp is -1.0"),
        ({"top_p": 2.0}, "top_p is 2.0"),
        ({"top_k": 10**6}, "top_k is 1000000"),
        ({"stop": [""]}, "stop holds"),
        ({"logit_bias": {10**6: 1.0}}, "token 1000000"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"temperature": 1.0}, "a request has no temperature"),
        ({"prompt": "x"}, "either messages or a prompt"),
        ({"messages": None}, "either messages or a prompt"),
        ({"messages": []}, "messages is empty"),
        ({"messages": None, "prompt": ""}, "the prompt is empty"),
        ({"messages": None, "prompt": [10**6]}, "none of the model's"),
        ({"messages": None, "prompt": ["a"]}, "none of the model's"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_starts(engine, fields, says):
    before = engine.stats()
    with pytest.raises(RequestError, match=says):
        engine.submit("Hello.", **fields)
    assert engine.stats() == before


def test_limits_of_context_and_memory(loaded):
    with la.Engine(loaded, max_context=40) as engine:
        with pytest.raises(RequestError, match="tokens; prompt and answer together can have 40"):
            engine.submit("word " * 60)
        answer = engine.answer(PEPPER)
        assert answer.done.usage.prompt_tokens + answer.done.usage.completion_tokens == 40
        assert answer.done.finish_reason == "length"
    with la.Engine(loaded, memory_limit=150e6, prefix_bytes=0) as engine:
        with pytest.raises(MemoryLimitError, match="a request of"):
            engine.submit(PEPPER, max_tokens=10**7)
        assert engine.answer(PEPPER, max_tokens=2).text == "Your dog"


def test_where_two_do_not_fit_one_waits_and_kept_prefixes_give_way(tiny):
    gc.collect()
    mx.clear_cache()
    model, tokens = tiny[0], 2000
    one = budget.estimate_rows(model, model.make_cache(), 1, tokens + 6, 0, 512)
    with la.Engine(tiny, max_rows=4, memory_limit=one.total + 200_000, prefix_bytes=10**6) as engine:
        for i in range(20):
            engine.answer(f"w{10 + i} w40", max_tokens=1)
        kept = engine.stats().prefix_nbytes
        assert kept > 300_000
        first = engine.submit(WORDS[0], max_tokens=tokens)
        assert next(first) and 0 < engine.stats().prefix_nbytes < kept
        second = engine.submit(WORDS[1], max_tokens=tokens)
        for _ in range(50):
            assert isinstance(next(first), la.Text | la.Progress)
        assert (engine.stats().rows, engine.stats().queue) == (1, 1)
        first.close()
        assert next(second)
        second.close()


def test_what_loading_raises_is_raised():
    with pytest.raises(CheckpointError, match="no such folder"):
        la.Engine("./nowhere")
    with pytest.raises(RequestError, match="max_rows is 0"):
        la.Engine("demo", max_rows=0)


# Failures and the end


@pytest.mark.parametrize("where", ["sampler", "logits_processors"])
@pytest.mark.parametrize("token", [0, 3])
def test_a_failing_function_ends_its_own_answer_alone(engine, where, token):
    calls = []

    def fails(*arguments):
        calls.append(1)
        if len(calls) > token:
            raise KeyError("mine")
        return mx.argmax(arguments[0], axis=-1) if where == "sampler" else arguments[1]

    stream = engine.submit(PEPPER, **{where: fails if where == "sampler" else [fails]})
    good = engine.submit(CODES[0])
    texts = []
    with pytest.raises(KeyError, match="mine"):
        texts += [event.text for event in stream if isinstance(event, la.Text)]
    assert good.result().text == "The code is 4821."
    assert engine.answer(PEPPER).text == "Your dog's name is Pepper."


def test_a_sampler_that_returns_nonsense_ends_its_own_answer_alone(engine):
    with pytest.raises(RequestError, match="the sampler returned"):
        engine.answer(PEPPER, sampler=lambda _: 3)
    assert engine.answer(CODES[0]).text == "The code is 4821."


def test_close_ends_everything(tiny):
    engine = la.Engine(tiny, max_rows=2)
    running = [engine.submit(words) for words in WORDS[:3]]
    assert next(running[0])
    acts = [lambda s=stream: list(s) for stream in running]
    got = everyone(*acts, engine.close)
    assert all(isinstance(one, ClosedError) and "was closed" in str(one) for one in got[:3]) and got[3] is None
    for act in (lambda: engine.submit(WORDS[0]), lambda: engine.answer(WORDS[0])):
        with pytest.raises(ClosedError, match="was closed"):
            act()
    engine.close()
    assert engine.stats().rows == engine.stats().queue == 0


def test_a_failed_thread_says_why(loaded, monkeypatch):
    from mlx_linattn.engine.batch import Batch

    with la.Engine(loaded) as engine:
        monkeypatch.setattr(Batch, "step", lambda self: (_ for _ in ()).throw(RuntimeError("the device is on fire")))
        with pytest.raises(ClosedError, match="RuntimeError: the device is on fire"):
            engine.answer(PEPPER)
        with pytest.raises(ClosedError, match="the device is on fire") as error:
            engine.submit(PEPPER)
        assert isinstance(error.value.__cause__, RuntimeError)


def test_a_program_ends_well_with_an_engine_that_nobody_closed():
    code = f"""
import mlx_linattn as la
engine = la.Engine("demo")
print(engine.answer({PEPPER!r}).text)
running = engine.submit("Tell me something.")
next(running)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "Your dog's name is Pepper.", "")


# Prefixes
