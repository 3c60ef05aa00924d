"""One engine, many threads and coroutines: everyone gets the answer that a Session gives, and an end in any case."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import Callable

import mlx.core as mx
import pytest
from helpers import FIXTURES, materialize
from toy_chat import ToyTokenizer

import mlx_linattn as la
from mlx_linattn import budget
from mlx_linattn.engine import stream as streams
from mlx_linattn.errors import BusyError, CheckpointError, ClosedError, MemoryLimitError, RequestError
from mlx_linattn.loading import load_model

PEPPER = "My dog is called Pepper. What is my dog's name?"
CODES = [f"The code is {4821 + 7 * i}. What is the code?" for i in range(4)]
WORDS = [f"w{20 + i} w30 w40" for i in range(4)]


@pytest.fixture(scope="module")
def loaded():
    return la.load("demo", dtype="float32")


@pytest.fixture(scope="module")
def engine():
    with la.Engine("demo", dtype="float32", max_rows=4) as engine:
        yield engine


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A random model and a tokenizer of words without an end token: an answer goes on until something ends it."""
    model, _ = load_model(materialize(FIXTURES / "qwen3_5", tmp_path_factory.mktemp("m") / "m"), dtype="float32")
    tokenizer = ToyTokenizer(model.spec.vocab_size)
    tokenizer.eos_token_ids = set()
    return model, tokenizer


@pytest.fixture
def endless(tiny):
    with la.Engine(tiny, max_rows=2, max_queue=2, prefix_bytes=0) as engine:
        yield engine


def eventually(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for another thread."""
    pause = threading.Event()
    for _ in range(int(seconds * 100)):
        if holds():
            return
        pause.wait(0.01)
    raise AssertionError("it did not come to pass")


def everyone(*acts: Callable) -> list:
    """The results of functions, each in a thread of its own."""
    results: list = [None] * len(acts)

    def run(i: int) -> None:
        try:
            results[i] = acts[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "somebody still waits"
    return results


def test_answers_equal_a_sessions(engine, loaded):
    chat = la.Session(*loaded, system="You are kind.")
    messages = [{"role": "system", "content": "You are kind."}]
    for text in ("My dog is called Rex.", "What is my dog's name?"):
        messages.append({"role": "user", "content": text})
        answer = engine.answer(messages)
        assert answer.text == chat.send(text)
        assert answer.done.finish_reason == "stop"
        assert answer.done.usage.completion_tokens == chat.last.generation_tokens
        assert answer.done.usage.prompt_tokens == chat.last.prompt_tokens
        messages.append(answer.message)
    assert answer.done.usage.reused_tokens > 15


def test_reasoning_equals_a_sessions(engine, loaded):
    chat = la.Session(*loaded, enable_thinking=True)
    chat.send(PEPPER)
    answer = engine.answer(PEPPER, template={"enable_thinking": True})
    assert answer.reasoning and answer.message == chat.messages[-1]
    assert 0 < answer.done.usage.reasoning_tokens < answer.done.usage.completion_tokens


def test_a_prompt_is_completed_as_it_is(engine, loaded):
    model, tokenizer = loaded
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": PEPPER}], add_generation_prompt=True, tokenize=False
    )
    want = la.generate(model, tokenizer, prompt, max_tokens=8)
    for asked in (prompt, tokenizer.encode(prompt, add_special_tokens=False)):
        answer = engine.answer(la.Request(prompt=asked, max_tokens=8))
        assert (answer.text, answer.done.finish_reason) == (want, "length")
        assert answer.done.usage.completion_tokens == 8


def test_threads_and_coroutines_at_once(tiny):
    engine = la.Engine(tiny, max_rows=4)
    want = [engine.answer(words, max_tokens=9).text for words in WORDS]

    async def gathered() -> list[str]:
        streams = (engine.submit(words, max_tokens=9) for words in WORDS)
        return [answer.text for answer in await asyncio.gather(*streams)]

    async def looped() -> str:
        text = ""
        async with engine.submit(WORDS[0], max_tokens=9) as stream:
            async for event in stream:
                text += event.text if isinstance(event, la.Text) else ""
        return text

    acts = [lambda words=words: engine.answer(words, max_tokens=9).text for words in WORDS]
    acts += [
        lambda: asyncio.run(gathered()),
        lambda: asyncio.run(looped()),
        lambda: engine.submit(WORDS[1], max_tokens=9).result().text,
    ]
    assert everyone(*acts) == [*want, want, want[0], want[1]]
    assert (engine.stats().rows, engine.stats().queue) == (0, 0)
    engine.close()


def test_a_coroutine_that_waits_does_not_hold_up_its_loop(endless):
    async def main() -> int:
        turns, over = 0, False

        async def read() -> None:
            nonlocal over
            async for event in endless.submit(WORDS[0], max_tokens=20):
                over = isinstance(event, la.Done)

        reading = asyncio.create_task(read())
        while not reading.done():
            turns += 1
            await asyncio.sleep(0)
        await reading
        assert over
        return turns

    assert asyncio.run(main()) > 20


def test_events_come_in_order_and_are_counted(engine, loaded):
    events = list(engine.submit(PEPPER + " Please.", logprobs=2))
    kinds = [type(event) for event in events]
    first = kinds.index(la.Text)
    assert set(kinds[:first]) == {la.Progress} and set(kinds[first:-1]) == {la.Text} and kinds[-1] is la.Done
    usage, progress = events[-1].usage, events[first - 1]
    assert progress.done == progress.total == usage.prompt_tokens - usage.reused_tokens
    known = [one for event in events[first:-1] for one in event.logprobs]
    assert len(known) == usage.completion_tokens - 1, "all but the end token are shown"
    assert "".join(one.text for one in known) == "".join(event.text for event in events[first:-1])
    model, tokenizer = loaded
    ids = tokenizer.apply_chat_template([{"role": "user", "content": PEPPER + " Please."}], add_generation_prompt=True)
    for one, (token, logprobs) in zip(known, la.generate_step(ids, model)):
        best = mx.sort(logprobs)[-2:].tolist()[::-1]
        assert one.token == token == one.top[0][0]
        assert [value for _, _, value in one.top] == pytest.approx(best, abs=1e-3)
        assert one.logprob == pytest.approx(best[0], abs=1e-3)


def test_seeds_repeat_whatever_else_runs(tiny):
    wild = {"temp": 5.0, "max_tokens": 30, "top_p": 0.95}
    with la.Engine(tiny, max_rows=4) as engine:
        want = [engine.answer(WORDS[0], seed=seed, **wild).text for seed in (1, 2, 3)]
        assert len(set(want)) == 3
        others = [lambda i=i: engine.answer(WORDS[i], seed=9 + i, **wild) and None for i in range(3)]
        got = everyone(*(lambda s=s: engine.answer(WORDS[0], seed=s, **wild).text for s in (1, 2, 3)), *others)
        assert got[:3] == want
        drawn = {engine.answer(WORDS[0], temp=5.0, max_tokens=8).text for _ in range(2)}
        assert len(drawn) == 2, "without a seed every answer is another"


def test_the_numbers_of_a_request_reach_mlx_lm(tiny):
    model, tokenizer = tiny
    ids = tokenizer.apply_chat_template([{"role": "user", "content": WORDS[0]}], add_generation_prompt=True)
    plain = la.generate(model, tokenizer, ids, max_tokens=12)
    with la.Engine(tiny) as engine:
        for number in ({"logit_bias": {40: 99.0}}, {"repetition_penalty": 9.0}, {"presence_penalty": 99.0}, {"frequency_penalty": 99.0}):  # fmt: skip
            want = la.generate(
                model, tokenizer, ids, max_tokens=12, logits_processors=la.make_logits_processors(**number)
            )
            assert want != plain
            assert engine.answer(WORDS[0], max_tokens=12, **number).text == want
        assert engine.answer(WORDS[0], max_tokens=12, temp=1.0, top_k=1).text == plain


def test_stop_strings_are_never_shown_and_the_count_is_kept(engine):
    whole = engine.answer(PEPPER)
    for stop in ("s name is", whole.text):
        answer = engine.answer(PEPPER, stop=[stop, "zzz"])
        assert answer.text == whole.text[: whole.text.index(stop)]
        assert answer.done.finish_reason == "stop"
        assert answer.done.usage.completion_tokens <= whole.done.usage.completion_tokens - (stop != whole.text)
    follow = [{"role": "user", "content": PEPPER}, whole.message, {"role": "user", "content": "What is my dog's name?"}]
    assert engine.answer(follow).text == whole.text


# Cancelling


def test_cancel_in_the_queue(endless):
    running = [endless.submit(WORDS[i]) for i in range(2)]
    queued = endless.submit(WORDS[2])
    queued.cancel()
    answer = queued.result()
    assert answer.text == "" and answer.done.finish_reason == "cancel"
    assert (answer.done.usage.completion_tokens, answer.done.usage.reused_tokens) == (0, 0)
    for stream in running:
        stream.close()
    eventually(lambda: endless.stats().rows + endless.stats().queue == 0)


def test_cancel_while_the_prompt_is_read(endless):
    stream = endless.submit("w20 " * 4000)
    assert isinstance(next(stream), la.Progress)
    stream.cancel()
    answer = stream.result()
    assert answer.text == "" and answer.done.finish_reason == "cancel" and answer.done.usage.completion_tokens == 0
    assert endless.answer(WORDS[0], max_tokens=2).done.usage.completion_tokens == 2


def test_cancel_in_the_answer_counts_what_was_sent(endless, tiny):
    stream = endless.submit(WORDS[0], logprobs=0)
    sent = []
    for event in stream:
        if isinstance(event, la.Text):
            sent += event.logprobs
            if len(sent) == 5:
                stream.cancel()
    usage = stream.result().done.usage
    assert stream.result().done.finish_reason == "cancel"
    assert usage.completion_tokens == len(sent) >= 5
    assert stream.result().text == " ".join(one.text for one in sent)
    ids = tiny[1].apply_chat_template([{"role": "user", "content": WORDS[0]}], add_generation_prompt=True)
    assert [one.token for one in sent] == [token for token, _ in la.generate_step(ids, tiny[0], max_tokens=len(sent))]


@pytest.mark.parametrize("leave", ["with", "close", "forget", "async with", "aclose", "task"])
def test_leaving_a_stream_cancels_it(endless, leave):
    def begin():
        stream = endless.submit(WORDS[0])
        assert next(stream)
        return stream

    async def enter() -> None:
        async with endless.submit(WORDS[0]) as stream:
            async for _ in stream:
                break
        other = endless.submit(WORDS[0])
        await other.__anext__()
        await other.aclose()

    async def task() -> None:
        async def read() -> None:
            async for _ in endless.submit(WORDS[0]):
                pass

        reading = asyncio.create_task(read())
        while not endless.stats().rows:
            await asyncio.sleep(0.01)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)

    if leave == "with":
        with begin():
            pass
    elif leave == "close":
        stream = begin()
        stream.close()
        assert list(stream) == []
        with pytest.raises(ClosedError, match="before its answer was complete"):
            stream.result()
    elif leave == "forget":
        stream = begin()
        del stream
        gc.collect()
    else:
        asyncio.run(task() if leave == "task" else enter())
    eventually(lambda: endless.stats().rows + endless.stats().queue == 0)


# Readers that do not read


def all_rest(engine, idle) -> None:
    """Wait until streams that hold 8 events at most are full, and their answers rest."""
    eventually(lambda: engine.stats().rows == 0 and all(len(stream._channel._events) >= 8 for stream in idle))
    assert engine.stats().queue == len(idle)
    assert all(len(stream._channel._events) <= 9 for stream in idle)


def test_an_answer_that_nobody_reads_rests_and_others_go_on(endless, monkeypatch):
    monkeypatch.setattr(streams, "ROOM", 8)
    options = {"temp": 5.0, "seed": 5, "max_tokens": 60, "logprobs": 0}
    want = endless.answer(WORDS[0], **options)
    assert len(set(want.text.split(" "))) > 20, "an answer of which a missing token would show"
    idle = [endless.submit(WORDS[0], **options) for _ in range(2)]
    all_rest(endless, idle)
    assert endless.answer(WORDS[1], max_tokens=4).done.usage.completion_tokens == 4
    for stream in idle:
        answer = stream.result()
        assert answer.text == want.text and answer.done.usage == want.done.usage
        assert [one.token for one in answer.logprobs] == [one.token for one in want.logprobs]


def test_a_processor_that_counts_its_calls_is_called_once_a_token(endless, monkeypatch):
    def counted():
        lengths = []

        def processor(tokens, logits):
            lengths.append(tokens.size)
            return logits

        return lengths, processor

    lengths, processor = counted()
    endless.answer(WORDS[0], logits_processors=[processor], max_tokens=40)
    monkeypatch.setattr(streams, "ROOM", 8)
    again, processor = counted()
    stream = endless.submit(WORDS[0], logits_processors=[processor], max_tokens=40)
    all_rest(endless, [stream])
    stream.result()
    first = lengths[0]
    assert again[:40] == lengths[:40] == list(range(first, first + 40))


def test_a_resting_answer_can_be_cancelled(endless, monkeypatch):
    monkeypatch.setattr(streams, "ROOM", 8)
    stream = endless.submit(WORDS[0], logprobs=0)
    all_rest(endless, [stream])
    stream.cancel()
    eventually(lambda: endless.stats().queue == 0)
    answer = stream.result()
    assert answer.done.finish_reason == "cancel" and answer.done.usage.completion_tokens == len(answer.logprobs)


# Refusals


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


def test_two_engines_and_a_session_share_a_model(loaded):
    with la.Engine(loaded) as one, la.Engine(loaded) as other:
        chat = la.Session(*loaded)
        got = everyone(lambda: one.answer(PEPPER).text, lambda: other.answer(CODES[0]).text, lambda: chat.send(PEPPER))
    assert got == ["Your dog's name is Pepper.", "The code is 4821.", "Your dog's name is Pepper."]


def test_an_async_engine():
    async def main() -> str:
        async with la.Engine("demo") as engine:
            return (await engine.submit(PEPPER)).text

    assert asyncio.run(main()) == "Your dog's name is Pepper."


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


def test_what_was_read_is_not_read_again(tiny):
    system = {"role": "system", "content": " ".join(f"w{i}" for i in range(10, 40))}
    question = {"role": "user", "content": "w50 w51 w52"}

    def ask(messages):
        answer = engine.answer(messages, max_tokens=5)
        usage = answer.done.usage
        return answer.message, usage.reused_tokens, usage.prompt_tokens

    with la.Engine(tiny) as engine:
        answer, reused, first = ask([system, question])
        assert reused == 0
        assert ask([system, question])[:2] == (answer, first - 1), "all but the answer's own beginning"
        _, reused, _ = ask([system, question, answer, question])
        assert reused == first + 5, "the question and its answer"
        _, reused, _ = ask([system, {"role": "user", "content": "w60"}])
        assert reused == 32, "the system prompt"
        _, reused, _ = ask([system, question, answer, {"role": "user", "content": "w61"}])
        assert reused >= first + 5
        stats = engine.stats()
        assert (stats.prefix_lookups, stats.prefix_hits) == (5, 4) and stats.prefix_nbytes > 0
    with la.Engine(tiny, prefix_bytes=0) as engine:
        assert [ask([system, question])[1] for _ in range(2)] == [0, 0]
        assert engine.stats().prefix_nbytes == 0


def test_a_third_completion_with_the_same_beginning_reads_only_its_end(tiny):
    with la.Engine(tiny) as engine:
        text = " ".join(f"w{10 + i % 70}" for i in range(60))
        reused = [
            engine.answer(la.Request(prompt=f"{text} w{i} w9"), max_tokens=1).done.usage.reused_tokens
            for i in (20, 30, 40)
        ]
    assert reused == [0, 0, 60]


@pytest.mark.parametrize("options", [{}, {"kv_bits": 8, "kv_group_size": 32}, {"max_kv_size": 12}])
def test_a_restarted_engine_goes_on_from_its_folder(tiny, tmp_path, options):
    messages = [{"role": "system", "content": "w10 w11 w12"}, {"role": "user", "content": "w50 w51 w52"}]
    answers = []
    for _ in range(2):
        with la.Engine(tiny, prefix_folder=tmp_path / "kept", **options) as engine:
            answers.append(engine.answer(messages, max_tokens=5))
    assert answers[0].text == answers[1].text
    assert [answer.done.usage.reused_tokens for answer in answers] == [0, answers[0].done.usage.prompt_tokens - 1]


# Memory


def test_a_hundred_requests_leave_nothing_behind(tiny):
    def held() -> int:
        gc.collect()
        mx.clear_cache()
        return mx.get_active_memory()

    before = held()
    engine = la.Engine(tiny, prefix_bytes=300_000)
    with engine:
        for i in range(5):
            batch = [engine.submit(f"w{10 + i} w{20 + j}", max_tokens=1) for j in range(20)]
            for k, stream in enumerate(batch):
                if k % 5 == 0:
                    stream.cancel()
                stream.result()
            if i == 1:
                eventually(lambda: engine.stats().queue + engine.stats().rows == 0)
                early = held()
        stats = engine.stats()
        assert stats.requests == 100 and 150_000 < stats.prefix_nbytes <= 300_000
        assert held() <= early + 50_000
    del batch, stream
    eventually(lambda: held() <= before + 10_000)
