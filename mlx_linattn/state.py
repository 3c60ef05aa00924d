"""What a model remembers: fixed arrays for recurrent layers, a growing cache for attention layers, one count of tokens.

MLX arrays never change, so a snapshot of recurrent layers is a handful of references, and a snapshot of a cache is its
length: both have a constant size. Rows of a batch can hold different numbers of tokens; each row is stored without gaps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx

from .errors import StateError


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
    def lengths(self) -> mx.array | None:
        """[B] real tokens of each row, or None where no row is padded."""
        return None if all(count == self.T for count in self.counts) else mx.array(self.counts)


class RecurrentState:
    """A fixed number of arrays that every token replaces."""

    def __init__(self, size: int):
        self.arrays: list[mx.array | None] = [None] * size

    @property
    def state(self) -> list[mx.array]:
        return [array for array in self.arrays if array is not None]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.state)

    def reset(self) -> None:
        self.arrays = [None] * len(self.arrays)

    def snapshot(self) -> Any:
        return tuple(self.arrays)

    def restore(self, snapshot: Any) -> None:
        self.arrays = list(snapshot)


class KVState:
    """Keys and values of an attention layer in buffers that grow by half their size, so that growth costs O(1) a token."""

    FIRST = 256

    def __init__(self) -> None:
        self.keys: mx.array | None = None  # [B, Hkv, capacity, D]
        self.values: mx.array | None = None
        self.length = 0  # columns in use

    def append(self, keys, values, starts: tuple[int, ...]):
        """Store [B, Hkv, T, D] at each row's start; returns the keys and values from column 0 to the longest row's end."""
        T = keys.shape[2]
        end = max(starts) + T
        self.keys, self.values = self._room(self.keys, keys, end), self._room(self.values, values, end)
        if len(set(starts)) == 1:
            self.keys[:, :, starts[0] : end] = keys
            self.values[:, :, starts[0] : end] = values
        else:
            columns = (mx.array(starts)[:, None] + mx.arange(T))[:, None, :, None]  # [B, 1, T, 1]
            self.keys = mx.put_along_axis(self.keys, mx.broadcast_to(columns, keys.shape), keys, axis=2)
            self.values = mx.put_along_axis(self.values, mx.broadcast_to(columns, values.shape), values, axis=2)
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _room(self, buffer, new, end):
        if buffer is not None and buffer.shape[2] >= end:
            return buffer
        B, heads, _, D = new.shape
        have = 0 if buffer is None else buffer.shape[2]
        capacity = max(self.FIRST, end, have + have // 2)
        capacity = -(-capacity // self.FIRST) * self.FIRST
        more = mx.zeros((B, heads, capacity - have, D), new.dtype)
        return more if buffer is None else mx.concatenate([buffer, more], axis=2)

    @property
    def state(self) -> list[mx.array]:
        return [] if self.keys is None else [self.keys, self.values]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.state)

    def reset(self) -> None:
        self.keys = self.values = None
        self.length = 0

    def snapshot(self) -> Any:
        return self.length

    def restore(self, snapshot: Any) -> None:
        if snapshot > self.length:
            raise StateError(f"cannot restore a cache of {self.length} tokens to {snapshot}: it can only go back")
        self.length = snapshot


class WindowState(RecurrentState):
    """Keys and values of the last ``window`` tokens of each row, in two arrays that never grow: position p lies in slot p % window.

    Every token makes new arrays (in the old ones' memory, unless a snapshot holds them), so that a snapshot is two references.
    """

    def __init__(self, window: int):
        super().__init__(2)
        self.window = window

    def append(self, keys, values, span: Span):
        """Store [B, Hkv, T, D]; returns keys, values and, for :func:`ops.attention`, which of their columns a token sees."""
        W, T = self.window, span.T
        if self.arrays[0] is None:
            self.arrays = [mx.zeros((*x.shape[:2], W, x.shape[3]), x.dtype) for x in (keys, values)]
        if T == 1 and span.lengths is None:
            return self._append_one(keys, values, span.starts)
        past = min(W - 1, max(span.starts))
        starts, counts = mx.array(span.starts)[:, None], mx.array(span.counts)[:, None]
        slots = mx.arange(W)
        oldest_first = (starts + slots) % W  # [B, W]: column c holds position start - W + c
        kept = counts + (slots - starts - counts) % W  # [B, W]: the column, of W old ones and T new ones, for each slot
        joined = []
        for i, new in enumerate((keys, values)):
            old = mx.take_along_axis(self.arrays[i], oldest_first[:, None, :, None], axis=2)
            both = mx.concatenate([old, new], axis=2)
            self.arrays[i] = mx.take_along_axis(both, kept[:, None, :, None], axis=2)
            joined.append(both[:, :, W - past :])
        missing = tuple(past - min(past, start) for start in span.starts)
        first = missing if any(missing) else None
        return *joined, {"starts": (past,) * len(span.starts), "window": W, "first": first}

    def _append_one(self, keys, values, starts):
        W = self.window
        slots = mx.array([start % W for start in starts])
        for i, new in enumerate((keys, values)):
            if len(set(starts)) == 1:
                self.arrays[i] = mx.slice_update(self.arrays[i], new, slots[:1], (2,))
            else:
                index = mx.broadcast_to(slots[:, None, None, None], new.shape)
                self.arrays[i] = mx.put_along_axis(self.arrays[i], index, new, axis=2)
        last = tuple(min(start, W - 1) for start in starts)  # a full buffer is seen whole, whatever its order
        used = max(last) + 1
        return *(array[:, :, :used] for array in self.arrays), {"starts": last}


@dataclass(frozen=True)
class Snapshot:
    """A moment of a ModelState, of constant size; good for that state and its forks, backwards in time only."""

    counts: tuple[int, ...]
    layers: tuple[Any, ...]
    restores: int  # how often the state had been restored when this was taken
    nbytes: int


class ModelState(Sequence):
    """The state of every layer and the number of tokens read so far. A sequence of layer states, as mlx_lm's caches are."""

    def __init__(self, layers: Sequence[RecurrentState | KVState]):
        self.layers = list(layers)
        self.counts: tuple[int, ...] = ()  # tokens read, a row each; empty before the first token
        self._restored_to: list[tuple[int, ...]] = []  # what every restore so far went back to

    def __getitem__(self, index):
        return self.layers[index]

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[RecurrentState | KVState]:
        return iter(self.layers)

    @property
    def offset(self) -> int:
        """Tokens read so far (of the longest row)."""
        return max(self.counts, default=0)

    @property
    def arrays(self) -> list[mx.array]:
        """Everything to evaluate between calls, so that no lazy graph grows."""
        return [array for layer in self.layers for array in layer.state]

    @property
    def recurrent_nbytes(self) -> int:
        """Bytes that stay the same however long the context is."""
        return sum(layer.nbytes for layer in self.layers if isinstance(layer, RecurrentState))

    @property
    def kv_nbytes(self) -> int:
        """Bytes that grow with the context."""
        return sum(layer.nbytes for layer in self.layers if isinstance(layer, KVState))

    @property
    def nbytes(self) -> int:
        return self.recurrent_nbytes + self.kv_nbytes

    def span(self, B: int, T: int, counts: Sequence[int] | None) -> Span:
        """The next call's span; ``counts`` are the real tokens of each row, all T by default."""
        starts = self.counts or (0,) * B
        if len(starts) != B:
            raise StateError(
                f"this state holds {len(starts)} rows, the input has {B}: use a state of its own for another batch"
            )
        return Span(starts, tuple(counts) if counts is not None else (T,) * B, T)

    @contextmanager
    def advancing(self, span: Span) -> Iterator[None]:
        """Let the layers read ``span``; if anything interrupts them, all of them are as they were."""
        before = [layer.snapshot() for layer in self.layers]
        try:
            yield
        except BaseException:
            for layer, part in zip(self.layers, before):
                layer.restore(part)
            raise
        self.counts = tuple(start + count for start, count in zip(span.starts, span.counts))

    def reset(self) -> None:
        """Forget everything."""
        for layer in self.layers:
            layer.reset()
        self.counts = ()
        self._restored_to.append(())

    def snapshot(self) -> Snapshot:
        layers = tuple(layer.snapshot() for layer in self.layers)
        return Snapshot(self.counts, layers, len(self._restored_to), self.recurrent_nbytes)

    def reaches(self, snapshot: Snapshot) -> bool:
        """Whether the keys and values that ``snapshot`` needs are still there: no restore since then went back further."""
        later = [self.counts, *self._restored_to[snapshot.restores :]]
        return all(_covers(counts, snapshot.counts) for counts in later)

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to ``snapshot`` exactly. Raises StateError where it lies ahead, was overwritten, or is another model's."""
        if len(snapshot.layers) != len(self.layers):
            raise StateError(
                f"the snapshot has {len(snapshot.layers)} layers, this state {len(self.layers)}: it is another model's"
            )
        if not self.reaches(snapshot):
            raise StateError(
                f"cannot restore this state of {self.offset} tokens to {max(snapshot.counts)}: "
                "it never held those tokens, or went back behind them since"
            )
        for layer, part in zip(self.layers, snapshot.layers):
            layer.restore(part)
        self.counts = snapshot.counts
        self._restored_to.append(snapshot.counts)


def _covers(counts, wanted) -> bool:
    return len(wanted) <= len(counts) and all(have >= want for have, want in zip(counts, wanted))
