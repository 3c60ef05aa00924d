"""The two programs that can be measured, behind the same few words: read on, write some tokens, mark and go back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx

from ..generation import generate_step, prefill
from ..model import Model
from ..state import KVOptions

Progress = Callable[[int], None]  # how many tokens of those to read have been read


class Ours:
    """This library, on one state."""

    name = "mlx_linattn"

    def __init__(self, model: Model, options: KVOptions, step: int, limit: float | None):
        self.model, self.step, self.limit = model, step, limit
        self.state = model.make_cache(options)

    def read(self, ids: Sequence[int], room: int, progress: Progress) -> None:
        """Read ids; ``room`` more tokens will follow."""
        self.state.reserve(self.state.offset + len(ids) + room)
        prefill(self.model, ids, self.state, self.step, lambda done, _: progress(done))

    def skip(self, tokens: int, room: int) -> None:
        """As if ``tokens`` more had been read: the time of a token depends on how many keys and values there are, not on which."""
        self.state.skip(tokens, room)

    def write(self, token: int, count: int) -> list[float]:
        """Seconds for each of ``count`` tokens after a first one that is not timed."""
        stream = generate_step(
            [token], self.model, max_tokens=count + 1, prompt_cache=self.state, memory_limit=self.limit
        )
        times = paced(stream)
        mx.eval(self.state.arrays)  # one token was begun ahead
        return times

    def mark(self) -> Any:
        return self.state.snapshot()

    def back_to(self, mark: Any) -> None:
        self.state.restore(mark)

    @property
    def state_bytes(self) -> int:
        return self.state.recurrent_nbytes

    @property
    def kv_bytes(self) -> int:
        return self.state.kv_nbytes


def paced(stream: Iterable) -> list[float]:
    """Seconds between one item and the next."""
    times: list[float] = []
    last = None
    for _ in stream:
        now = time.perf_counter()
        if last is not None:
            times.append(now - last)
        last = now
    return times
