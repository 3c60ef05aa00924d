"""An engine without a model: answers that are written down, with the engine's contract."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from mlx_linattn.engine.types import Done, Reasoning, Text, Timing, Usage

DONE = Done("stop", Usage(12, 5, 3, 1), Timing(0.0, 0.0, 0.0))
PLAIN = [Reasoning("hm"), Text("Hello"), Text(" there"), DONE]


class FakeStream:
    """Events, and exceptions, which are raised; an asyncio.Event is waited for."""

    def __init__(self, script, engine):
        self.script, self.engine, self.cancelled, self.closed = list(script), engine, False, False
        self.prompt_tokens = 12
        engine.open += 1

    def __aiter__(self):
        return self

    async def __anext__(self):
        await asyncio.sleep(0)
        if not self.script:
            raise StopAsyncIteration
        one = self.script.pop(0)
        while isinstance(one, asyncio.Event):
            await one.wait()
            one = self.script.pop(0)
        if isinstance(one, Exception):
            raise one
        return one

    def cancel(self):
        if not self.cancelled:
            self.cancelled = True
            self.script = [Done("cancel", DONE.usage, DONE.timing)]

    async def aclose(self):
        if not self.closed:
            self.closed = True
            self.engine.open -= 1


class FakeEngine:
    """Every request gets ``script``; ``refusal`` is raised instead where it is set."""

    name = "fake"

    def __init__(self, script=PLAIN, refusal=None, has_tool_calling=True):
        self.script, self.refusal = script, refusal
        self.tokenizer = SimpleNamespace(has_tool_calling=has_tool_calling)
        self.requests, self.open, self.closed = [], 0, False

    def submit(self, request):
        if self.refusal:
            raise self.refusal
        self.requests.append(request)
        self.streams = [FakeStream(self.script, self)]
        return self.streams[-1]

    def stats(self):
        return SimpleNamespace(rows=self.open, queue=0)

    def close(self, timeout=None):
        self.closed = True
