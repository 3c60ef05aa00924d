from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx


@dataclass(frozen=True)
class Span:
    """What one call of the model covers: row r brings its tokens starts[r] to starts[r] + counts[r], padded on the right to T."""

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    T: int

    @cached_property
    def offset(self) -> int | mx.array:
        """Position of the first column, as mx.fast.rope takes it."""
        return self.starts[0] if len(set(self.starts)) == 1 else mx.array(self.starts)

    @cached_property
    def places(self) -> int | mx.array:
        """Where a cache without gaps stores the tokens: the first column, or [B, T] columns where rows begin at different ones."""
        return self.starts[0] if len(set(self.starts)) == 1 else self.offset[:, None] + mx.arange(self.T)

    @cached_property
    def lengths(self) -> mx.array | None:
        """[B] real tokens of each row, or None where no row is padded."""
        return None if all(count == self.T for count in self.counts) else mx.array(self.counts)

    @cached_property
    def _masks(self) -> dict:
        return {}

    def mask(self, last: tuple[int, ...], columns: int) -> mx.array | None:
        """[B, 1, 1, columns] booleans for one token of each row: it sees the columns up to ``last``; made once for all layers.

        None where that would be no mask: a prompt's would be large, and rows in step need none.
        """
        if self.T > 1 or len(set(last)) == 1:
            return None
        if (last, columns) not in self._masks:
            self._masks[last, columns] = (mx.arange(columns) <= mx.array(last)[:, None])[:, None, None]
        return self._masks[last, columns]

    def blocks(self, size: int) -> Iterator[tuple[int, int, Span]]:
        """The same tokens, ``size`` columns at a time: first column, end, and the span of those columns."""
        for begin in range(0, self.T, size):
            end = min(begin + size, self.T)
            done = [min(begin, count) for count in self.counts]
            starts = tuple(start + n for start, n in zip(self.starts, done))
            counts = tuple(min(count - n, end - begin) for count, n in zip(self.counts, done))
            yield begin, end, Span(starts, counts, end - begin)
