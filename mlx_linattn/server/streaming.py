"""Events while the client is there: as they come, as server-sent events, and stopped when nobody listens any more."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import suppress

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..engine.types import Done, Event, Progress
from .problems import INTERNAL, ApiError, as_api_error
from .replies import Reply

log = logging.getLogger(__name__)


class ClientGone(Exception):
    """The client has closed the connection."""


async def watched(stream, receive: Receive, reply: Reply, patience: float | None = None) -> AsyncIterator[Event | None]:
    """The events of an engine's stream; None whenever there was none for ``patience`` seconds.

    Only Done comes after what is enough for ``reply``. Raises ClientGone when the client has left. However it ends, the engine's stream is closed.
    """
    gone = asyncio.ensure_future(_gone(receive))
    event: asyncio.Future | None = None
    try:
        while True:
            event = event or asyncio.ensure_future(stream.__anext__())
            done, _ = await asyncio.wait({event, gone}, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if gone in done:
                raise ClientGone
            if event not in done:
                yield None
                continue
            try:
                value = event.result()
            except StopAsyncIteration:
                return
            event = None
            if isinstance(value, Done) or not reply.enough():
                reply.note(value)
                yield value
            if reply.enough():
                stream.cancel()
    finally:
        waiting = [task for task in (gone, event) if task is not None and not task.done()]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await stream.aclose()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events: a chunk for each event, comments while the prompt is read or nothing comes, and ``[DONE]``."""

    media_type = "text/event-stream"

    def __init__(self, stream, reply: Reply, keep_alive: float):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.stream, self.reply, self.keep_alive = stream, reply, keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

        async def write(text: str, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": more})

        try:
            for chunk in self.reply.first():
                await write(_data(chunk))
            async for event in watched(self.stream, receive, self.reply, self.keep_alive):
                if event is None:
                    await write(": waiting\n\n")
                elif isinstance(event, Progress):
                    await write(f": prompt {event.done}/{event.total}\n\n")
                else:
                    for chunk in self.reply.chunk(event):
                        await write(_data(chunk))
            await write("data: [DONE]\n\n", more=False)
        except (ClientGone, OSError):
            pass  # nobody is left to be told
        except asyncio.CancelledError:  # the server ends, and its patience has
            with suppress(Exception):
                await write(_data(ApiError(503, "the server is shutting down", "service_unavailable").body), more=False)
            raise
        except Exception as error:
            await write(_data(told(error).body), more=False)
        finally:
            await self.stream.aclose()


def told(error: Exception) -> ApiError:
    """What the client is told of an error; a bug's details go to the log alone."""
    known = as_api_error(error)
    if known is None:
        log.error("internal error", exc_info=error)
        return INTERNAL
    return known


def _data(value: dict) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
