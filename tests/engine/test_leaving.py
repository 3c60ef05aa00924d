"""Answers that are cancelled, left or not read: each ends with the right counts, and the others go on."""

from __future__ import annotations

import asyncio
import gc

import pytest
from threads import eventually

import mlx_linattn as la
from mlx_linattn.engine import stream as streams
from mlx_linattn.errors import ClosedError

WORDS = [f"w{20 + i} w30 w40" for i in range(4)]


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
