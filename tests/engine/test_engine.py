"""One engine, many threads and coroutines: everyone gets the answer that a Session gives."""

from __future__ import annotations

import asyncio

import mlx.core as mx
import pytest
from helpers import held
from threads import eventually, everyone

import mlx_linattn as la

PEPPER = "My dog is called Pepper. What is my dog's name?"
CODE = "The code is 4821. What is the code?"
WORDS = [f"w{20 + i} w30 w40" for i in range(4)]


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


def test_two_engines_and_a_session_share_a_model(loaded):
    with la.Engine(loaded) as one, la.Engine(loaded) as other:
        chat = la.Session(*loaded)
        got = everyone(lambda: one.answer(PEPPER).text, lambda: other.answer(CODE).text, lambda: chat.send(PEPPER))
    assert got == ["Your dog's name is Pepper.", "The code is 4821.", "Your dog's name is Pepper."]


def test_an_async_engine():
    async def main() -> str:
        async with la.Engine("demo") as engine:
            return (await engine.submit(PEPPER)).text

    assert asyncio.run(main()) == "Your dog's name is Pepper."


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
