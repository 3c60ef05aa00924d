"""One model for a whole program: any thread or coroutine asks, one thread of the engine's own answers them all.

with la.Engine("demo") as engine:
    for event in engine.submit("My dog is called Pepper. What is my dog's name?"):
        ...
"""

from __future__ import annotations

import asyncio
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import RequestError
from ..state import KVOptions
from .choice import Choice
from .prompt import Renderer, as_request, check
from .stream import Channel, Stream
from .transcript import Transcript
from .types import Answer, Request
from .worker import Job, Worker


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


class Engine:
    """A model, loaded into a thread that owns it, its states and all generation.

    Args:
        model: a folder, a Hub id, ``demo``, or a pair (model, tokenizer) as :func:`mlx_linattn.load` returns it.
        max_rows: answers that are made at the same time; further ones wait.
        max_queue: requests that may wait; further ones raise BusyError.
        prefix_bytes: how much memory the states of prompts and answers may take that later requests go on from; by default a
            sixteenth of the working set; 0 keeps none.
        prefix_folder: where they are also kept on disk, to survive a restart: written when there is nothing else to do, and by
            :meth:`close`. It holds what people wrote, for your eyes only.
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
    ):
        for label, value, least in (("max_rows", max_rows, 1), ("max_queue", max_queue, 0)):
            if value < least:
                raise RequestError(f"{label} is {value}, expected {least} or more")
        options = KVOptions(max_kv_size, kv_bits, kv_group_size, quantized_kv_start)
        given = isinstance(model, tuple)
        self.name = getattr(model[0], "model_type", "model") if given else str(model)
        if given:
            mx.eval(model[0].parameters())  # only evaluated arrays may go to another thread
        self._worker = Worker(
            model, {"revision": revision, "dtype": dtype}, options,
            max_rows=max_rows, max_queue=max_queue, prefix_bytes=prefix_bytes, prefix_folder=None if prefix_folder is None else Path(prefix_folder), memory_limit=memory_limit,
        )  # fmt: skip
        self.tokenizer, self.config = self._worker.tokenizer, self._worker.config
        self._renderer = Renderer(self.tokenizer, self._worker.model.spec.vocab_size, max_context)
        # Also when the program ends, or forgets the engine.
        self._finalizer = weakref.finalize(self, self._worker.close)

    def submit(self, request: Request | list[dict] | str, **fields: Any) -> Stream:
        """Ask for an answer; ``fields`` are those of :class:`Request` and replace the request's.

        request: a :class:`Request`, a list of messages, or a text, which is a user's message.

        Renders and counts the prompt, and returns without waiting for any other answer. Raises BusyError where ``max_queue`` requests
        wait already, ClosedError after :meth:`close`, RequestError for arguments that make no sense, ContextLengthError for a prompt beyond
        ``max_context``, TokenizerError for messages where the model has no chat template, and MemoryLimitError for what would not
        fit even alone. Nothing was allocated then.
        """
        request = as_request(request, fields)
        check(request, self._renderer.vocabulary)
        prompt = self._renderer.prompt(request)
        limits = [request.max_tokens] if request.max_tokens > 0 else []
        if self._renderer.max_context is not None:
            limits.append(self._renderer.max_context - len(prompt.tokens))
        self._worker.require_room(len(prompt.tokens), max(request.max_tokens, 0))
        job = Job(
            request, prompt, min(limits, default=-1), Channel(self._worker.stir),
            Transcript(self.tokenizer, request, prompt.thinks, prompt.chat), Choice(request),
        )  # fmt: skip
        self._worker.submit(job)
        return Stream(job.channel, len(prompt.tokens), self)

    def answer(self, request: Request | list[dict] | str, **fields: Any) -> Answer:
        """:meth:`submit`, read to the end. Blocks."""
        return self.submit(request, **fields).result()

    def stats(self) -> Stats:
        """How many answers are made and wait now, what was made so far, and what kept prefixes hold. Never blocks."""
        worker = self._worker
        return Stats(
            rows=len(worker.rows), queue=worker.queue,
            **vars(worker.totals),
            prefix_nbytes=worker.prefixes.nbytes, prefix_hits=worker.prefixes.hits, prefix_lookups=worker.prefixes.lookups,
        )  # fmt: skip

    def close(self, timeout: float | None = None) -> None:
        """End the thread and free the model. Answers that are being made end with ClosedError. Waits at most ``timeout`` seconds."""
        self._worker.close(timeout)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(self, *exc) -> None:
        await asyncio.to_thread(self.close)
