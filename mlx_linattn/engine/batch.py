"""WORK IN PROGRESS: signatures only. Sequences that are answered together: one state, one model call for a token of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..model import Model
from ..state import KVOptions, ModelState


class Row:
    """One sequence of a Batch.

    tokens: the prompt and the answer so far.  prompt_tokens: how many of them were given.
    reused_tokens: how many of those the state held already.
    state: None while the batch keeps the row; afterwards the row's own state, evaluated, which has read
        ``tokens[:state.offset]``. Snapshots that ``checkpoints`` took of this row serve it (``state.restore``).
    """

    tokens: list[int]
    prompt_tokens: int
    reused_tokens: int
    state: ModelState | None


@dataclass(frozen=True)
class Step:
    """What happened to one row.

    token: chosen now, and the last of ``row.tokens``; None where ``done`` of ``total`` prompt tokens were read instead.
    logprobs: [V].  finish_reason: "stop" or "length" where the row has left with this token.
    error: where the row has left because its sampler, a processor or ``checkpoints`` raised this, or (without
        ``max_tokens``) because memory ended; then there is no token.
    """

    row: Row
    token: int | None = None
    logprobs: mx.array | None = None
    finish_reason: str | None = None
    done: int = 0
    total: int = 0
    error: Exception | None = None


class Batch:
    """At most ``max_rows`` sequences at a time; more wait for their turn. For one thread."""

    def __init__(
        self,
        model: Model,
        options: KVOptions = KVOptions(),  # noqa: B008 - frozen
        *,
        max_rows: int = 8,
        prefill_step: int = 512,
        memory_limit: float | None = None,
    ):
        raise NotImplementedError

    @property
    def rows(self) -> list[Row]:
        """Those that get a token with every step."""
        raise NotImplementedError

    @property
    def waiting(self) -> list[Row]:
        """Those whose prompts are being read, or will be, in the order in which they came."""
        raise NotImplementedError

    @property
    def idle(self) -> bool:
        raise NotImplementedError

    def add(
        self,
        tokens: Sequence[int],
        *,
        state: ModelState | None = None,
        sampler: Callable[[mx.array], mx.array] | None = None,
        logits_processors: Sequence[Callable[[mx.array, mx.array], mx.array]] = (),
        max_tokens: int = -1,
        stop_tokens: frozenset[int] = frozenset(),
        checkpoints: Callable[[ModelState], None] | None = None,
        ends: Sequence[int] = (),
    ) -> Row:
        """``state`` holds a proper prefix of ``tokens`` and is the batch's from now on (give a ``fork()`` to keep yours)."""
        raise NotImplementedError

    def step(self) -> list[Step]:
        raise NotImplementedError

    def remove(self, row: Row) -> ModelState:
        raise NotImplementedError
