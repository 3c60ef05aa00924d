"""What lies between the engine's thread, which makes events, and whoever reads them: a thread or a coroutine."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any

from ..errors import ClosedError
from .types import Answer, Done, Event, Progress, Reasoning, Text, ToolCall

ROOM = 256  # events that wait to be read before an answer rests


class Channel:
    """Events on their way. The engine puts, and never waits; a reader takes, and may wait.

    ``stir``: called, from any thread, when the engine should look: the reader cancelled, or has made room again.
    """

    def __init__(self, stir: Callable[[], None]):
        self.cancelled = False
        self._stir = stir
        self._changed = threading.Condition()
        self._events: deque[Event] = deque()
        self._over, self._error = False, None
        self._resting = False
        self._dropped = False
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future]] = []

    # The engine's side

    def put(self, event: Event) -> None:
        with self._changed:
            if self._dropped:
                return
            if isinstance(event, Progress) and self._events and isinstance(self._events[-1], Progress):
                self._events.pop()  # only the newest is news
            self._events.append(event)
            self._wake()

    def end(self, error: BaseException | None = None) -> None:
        """Nothing more will come; ``error`` is what the reader gets after the last event."""
        with self._changed:
            if not self._over:
                self._over, self._error = True, error
                self._wake()

    def rest(self) -> bool:
        """Whether so much waits to be read that the answer should rest; then :meth:`awake` tells when to go on."""
        with self._changed:
            self._resting = len(self._events) >= ROOM
            return self._resting

    @property
    def awake(self) -> bool:
        return self.cancelled or not self._resting

    def _wake(self) -> None:
        self._changed.notify_all()
        for loop, future in self._waiting:
            with suppress(RuntimeError):  # that loop is closed, and nobody waits any more
                loop.call_soon_threadsafe(_resolve, future)
        self._waiting.clear()

    # The reader's side

    def cancel(self, drop: bool = False) -> None:
        with self._changed:
            if drop:
                self._dropped = True
                self._events.clear()
            if self.cancelled or self._over:
                return
            self.cancelled = True
        self._stir()

    def take(self) -> Event | None:
        """The next event, or None at the end. Waits; raises what ended the stream early."""
        with self._changed:
            while not (self._events or self._over):
                self._changed.wait()
            event = self._next()
        return event

    async def take_async(self) -> Event | None:
        while True:
            with self._changed:
                if self._events or self._over:
                    return self._next()
                loop = asyncio.get_running_loop()
                future = loop.create_future()
                self._waiting.append((loop, future))
            await future

    def _next(self) -> Event | None:
        if not self._events:
            if self._error is not None:
                raise self._error
            return None
        event = self._events.popleft()
        if self._resting and len(self._events) <= ROOM // 2:
            self._resting = False
            self._stir()
        return event


def _resolve(future: asyncio.Future) -> None:
    if not future.done():
        future.set_result(None)


class Stream:
    """One answer as it is made: an iterator, and an async iterator, of events; the last one is :class:`Done`.

    What ends it early is raised from it: ClosedError where the engine was closed or has failed, MemoryLimitError where the answer no
    longer fits, and whatever the request's own sampler or logits processor raised.

    Leaving a ``with`` block, closing the stream and forgetting it cancel the request. A stream holds a bounded number of events: where
    nobody reads them this answer rests, others go on, and it resumes when it is read.
    """

    def __init__(self, channel: Channel, prompt_tokens: int, owner: Any):
        self.prompt_tokens = prompt_tokens
        self._channel = channel
        self._owner = owner  # the engine must not go away while somebody reads
        self._taken: list[Event] = []

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Event:
        event = self._channel.take()
        if event is None:
            raise StopIteration
        self._taken.append(event)
        return event

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Event:
        event = await self._channel.take_async()
        if event is None:
            raise StopAsyncIteration
        self._taken.append(event)
        return event

    def __await__(self) -> Generator[Any, None, Answer]:
        """``await stream`` reads it to its end and gives the :class:`Answer`."""
        return self._gather().__await__()

    async def _gather(self) -> Answer:
        async for _ in self:
            pass
        return self.result()

    def result(self) -> Answer:
        """Read to the end and return all of it, with what was read before. Blocks."""
        for _ in self:
            pass
        done = next((event for event in self._taken if isinstance(event, Done)), None)
        if done is None:
            raise ClosedError("this stream was closed before its answer was complete")
        texts = [event for event in self._taken if isinstance(event, Text)]
        return Answer(
            text="".join(event.text for event in texts),
            reasoning="".join(event.text for event in self._taken if isinstance(event, Reasoning)).strip("\n"),
            tool_calls=tuple(event for event in self._taken if isinstance(event, ToolCall)),
            done=done,
            logprobs=tuple(one for event in texts for one in event.logprobs),
        )

    def cancel(self) -> None:
        """Stop, from any thread: what was made until now can still be read, then comes ``Done("cancel")``. Never blocks."""
        self._channel.cancel()

    def close(self) -> None:
        """:meth:`cancel`, and drop what was not read."""
        self._channel.cancel(drop=True)

    async def aclose(self) -> None:
        """As :meth:`close`."""
        self.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *exc) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_channel"):
            self.close()
