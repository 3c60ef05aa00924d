"""One model for a whole program: any thread or coroutine asks, one thread of the engine's own answers them all.

with la.Engine("demo") as engine:
    for event in engine.submit("My dog is called Pepper. What is my dog's name?"):
        ...
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .types import Answer, Event, Request


@dataclass(frozen=True)
class Stats:
    """How an engine stands at a moment.

    rows: answers being made.  queue: requests that wait, those included whose reader has stopped reading.
    requests, prompt_tokens, reused_tokens, completion_tokens: sums over all requests that have ended.
    prefix_nbytes: bytes that kept prefixes hold.  prefix_hits, prefix_lookups: requests that found one, of how many.
    """

    rows: int
    queue: int
    requests: int
    prompt_tokens: int
    reused_tokens: int
    completion_tokens: int
    prefix_nbytes: int
    prefix_hits: int
    prefix_lookups: int


class Stream:
    """One answer as it is made: an iterator, and an async iterator, of events; the last one is :class:`Done`.

    What ends it early is raised from it: ClosedError where the engine was closed or has failed, MemoryLimitError where the answer
    no longer fits, and whatever the request's own sampler or logits processor raised.

    Leaving a ``with`` block, closing the stream and forgetting it cancel the request. A stream holds a bounded number of events: where
    nobody reads them, this answer rests, others go on, and it resumes when it is read.
    """

    prompt_tokens: int

    def __iter__(self) -> Iterator[Event]: ...
    def __next__(self) -> Event: ...
    def __aiter__(self) -> AsyncIterator[Event]: ...
    async def __anext__(self) -> Event: ...

    def __await__(self):
        """``await stream`` reads it to its end and gives the :class:`Answer`."""

    def cancel(self) -> None:
        """Stop, from any thread: what was made until now can still be read, then comes ``Done("cancel")``. Never blocks."""

    def result(self) -> Answer:
        """Read to the end and return all of it (with what was read before). Blocks."""

    def close(self) -> None:
        """:meth:`cancel`, and drop what was not read."""

    async def aclose(self) -> None: ...
    def __enter__(self) -> Stream: ...
    def __exit__(self, *exc) -> None: ...
    async def __aenter__(self) -> Stream: ...
    async def __aexit__(self, *exc) -> None: ...


class Engine:
    """A model, loaded into a thread that owns it, its states and all generation.

    Args:
        model: a folder, a Hub id, ``demo``, or a pair (model, tokenizer) as :func:`mlx_linattn.load` returns it.
        max_rows: answers that are made at the same time; further ones wait.
        max_queue: requests that may wait; further ones raise BusyError.
        prefix_bytes: how much memory the states of prompts and answers may take that later requests go on from; by default a
            sixteenth of the working set; 0 keeps none.
        prefix_folder: where they are also kept on disk, to survive a restart.
        memory_limit: bytes that all of it may take; by default the device's working set.
        max_context: the most tokens of a prompt and its answer together; by default there is no limit.
        max_kv_size, kv_bits, kv_group_size, quantized_kv_start: how attention keeps its context (:class:`KVOptions`).
        revision, dtype: as in :func:`mlx_linattn.load`.

    The constructor returns when the model is loaded, and raises what loading raises. All methods may be called from any thread.
    """

    tokenizer: Any  # mlx_lm's wrapper
    config: dict  # config.json
    name: str  # the model as it was asked for

    def __init__(
        self,
        model: str | Path | tuple[Any, Any],
        *,
        max_rows: int = 8,
        max_queue: int = 64,
        prefix_bytes: int | None = None,
        prefix_folder: str | Path | None = None,
        memory_limit: float | None = None,
        max_context: int | None = None,
        max_kv_size: int | None = None,
        kv_bits: int | None = None,
        kv_group_size: int = 64,
        quantized_kv_start: int = 0,
        revision: str | None = None,
        dtype: Any = None,
    ): ...

    def submit(self, request: Request | list[dict] | str, **fields: Any) -> Stream:
        """Ask for an answer; ``fields`` are those of :class:`Request` and replace the request's.

        request: a :class:`Request`, a list of messages, or a text, which is a user's message.

        Renders and counts the prompt, and returns without waiting for any other request. Raises BusyError where ``max_queue``
        requests wait already, ClosedError after :meth:`close`, RequestError for arguments that make no sense or a prompt beyond
        ``max_context``, TokenizerError for messages where the model has no chat template, and MemoryLimitError for what would not
        fit even alone. Nothing was allocated then.
        """

    def answer(self, request: Request | list[dict] | str, **fields: Any) -> Answer:
        """:meth:`submit`, read to the end. Blocks."""

    def stats(self) -> Stats: ...

    def close(self, timeout: float | None = None) -> None:
        """End the thread and free the model. Answers that are being made end with ClosedError. Waits at most ``timeout`` seconds."""

    def __enter__(self) -> Engine: ...
    def __exit__(self, *exc) -> None: ...
    async def __aenter__(self) -> Engine: ...
    async def __aexit__(self, *exc) -> None: ...
