"""OpenAI's own client against a server on the demo, alone and with many at a time."""

import asyncio
import random

import httpx
import mlx.core as mx
import openai
import pytest
from server.running import serving
from threads import eventually

from mlx_linattn.engine import Engine

PREFIX_BYTES = 4_000_000
FACTS = [
    ("My dog is called Pepper.", "What is my dog's name?"),
    ("The code is 4821.", "What is the code?"),
    ("My cat is called Momo.", "What is my cat's name?"),
    ("My dog is called Rex.", "What's my dog called?"),
]
PEPPER = [{"role": "user", "content": "My dog is called Pepper. What is my dog's name?"}]


@pytest.fixture(scope="module")
def engine():
    with Engine("demo", max_rows=8, max_queue=64, prefix_bytes=PREFIX_BYTES, max_context=600) as engine:
        yield engine


@pytest.fixture(scope="module")
def url(engine):
    with serving(engine, name="demo") as url:
        yield f"{url}/v1"


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_a_conversation_is_reused(client):
    assert [model.id for model in client.models.list()] == ["demo"]
    messages = [{"role": "user", "content": "My dog is called Pepper."}]
    first = client.chat.completions.create(model="demo", messages=messages)
    messages += [first.choices[0].message.model_dump(), {"role": "user", "content": "What is my dog's name?"}]
    second = client.chat.completions.create(model="demo", messages=messages)
    assert second.choices[0].message.content == "Your dog's name is Pepper."
    assert second.choices[0].finish_reason == "stop"
    usage = second.usage
    assert usage.prompt_tokens_details.cached_tokens > first.usage.prompt_tokens // 2
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_stream_says_the_same_with_its_usage(client):
    stream = client.chat.completions.create(
        model="demo", messages=PEPPER, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "Your dog's name is Pepper." and chunks[-1].usage.completion_tokens > 5
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"


def test_parameters_do_what_they_say(client, engine):
    def ask(**options):
        return client.chat.completions.create(model="demo", messages=PEPPER, **options).choices[0]

    assert ask(stop=" name").message.content == "Your dog's"
    cut = ask(max_completion_tokens=3)
    assert cut.finish_reason == "length" and "Your dog's name".startswith(cut.message.content)
    first, again = (ask(temperature=1.5, seed=5).message.content for _ in range(2))
    assert first == again
    chosen = ask(logprobs=True, top_logprobs=3, max_tokens=4).logprobs.content
    assert "".join(one.token for one in chosen) == "Your dog's name"
    assert all(len(one.top_logprobs) == 3 and one.top_logprobs[0].logprob == one.logprob <= 0 for one in chosen)
    (your,) = engine.tokenizer.encode("Your", add_special_tokens=False)
    assert not ask(logit_bias={str(your): -100}, max_tokens=3).message.content.startswith("Your")


def test_completions(client, engine):
    ids = engine.tokenizer.apply_chat_template(PEPPER, add_generation_prompt=True)
    answer = client.completions.create(model="demo", prompt=list(ids), logprobs=1)
    assert answer.choices[0].text == "Your dog's name is Pepper."
    assert "".join(answer.choices[0].logprobs.tokens) == "Your dog's name is Pepper."
    pieces = client.completions.create(model="demo", prompt=list(ids), stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == "Your dog's name is Pepper."


def test_errors_are_the_clients_own(client):
    with pytest.raises(openai.NotFoundError, match="gpt-9") as caught:
        client.chat.completions.create(model="gpt-9", messages=PEPPER)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="600") as caught:
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "word " * 900}])
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="knows no tools"):
        tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        client.chat.completions.create(model="demo", messages=PEPPER, tools=tools)


def test_a_full_queue_says_when_to_come_back():
    with Engine("demo", max_rows=1, max_queue=0, prefix_bytes=0) as engine, serving(engine, name="demo") as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        endless = {str(token): -100 for token in engine.tokenizer.eos_token_ids}
        words = {"messages": PEPPER, "logit_bias": endless, "max_tokens": 5000}
        with client.chat.completions.create(model="demo", stream=True, **words) as running:
            next(iter(running))
            eventually(lambda: engine.stats().rows == 1)
            with pytest.raises(openai.RateLimitError) as caught:
                client.chat.completions.create(model="demo", messages=PEPPER)
            assert int(caught.value.response.headers["retry-after"]) >= 1
        eventually(lambda: engine.stats().rows == 0)
        assert client.chat.completions.create(model="demo", messages=PEPPER).choices[0].finish_reason == "stop"


def test_many_streams_with_cancels_are_right_and_leave_nothing(url, engine):
    """Conversations of one and of two turns, some streamed and some not; a third leaves early."""
    chances = random.Random(7)
    conversations = [[{"role": "user", "content": f"{fact} {question}"}] for fact, question in FACTS]
    alone = [engine.answer(messages).text for messages in conversations]
    mx.clear_cache()
    before = mx.get_active_memory() - engine.stats().prefix_nbytes

    async def ask(client, which: int, leave: int | None, stream: bool) -> None:
        options = {"model": "demo", "messages": conversations[which]}
        if not stream:
            asking = asyncio.ensure_future(client.chat.completions.create(**options))
            if leave is not None:
                await asyncio.sleep(leave / 50)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            else:
                assert (await asking).choices[0].message.content == alone[which]
            return
        text, count = "", 0
        async with await client.chat.completions.create(stream=True, **options) as pieces:
            async for piece in pieces:
                text += piece.choices[0].delta.content or ""
                count += 1
                if count == leave:
                    assert alone[which].startswith(text)
                    return
        assert text == alone[which]

    async def all_of_them() -> None:
        limits = httpx.Limits(max_connections=None)
        async with openai.AsyncOpenAI(
            base_url=url, api_key="none", max_retries=0, http_client=httpx.AsyncClient(timeout=60, limits=limits)
        ) as client:
            asked = []
            for i in range(32):
                leave = chances.randint(1, 8) if chances.random() < 0.35 else None
                asked.append(ask(client, i % len(FACTS), leave, chances.random() < 0.75))
            await asyncio.gather(*asked)

    asyncio.run(all_of_them())
    eventually(lambda: engine.stats().rows == engine.stats().queue == 0)
    eventually(lambda: mx.get_active_memory() - engine.stats().prefix_nbytes <= before + 500_000)
    assert engine.stats().prefix_nbytes <= PREFIX_BYTES
    assert engine.answer(conversations[0]).text == alone[0]
