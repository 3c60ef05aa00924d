from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..errors import StateError
from .kv import KVState
from .options import KVOptions
from .recurrent import RecurrentState
from .span import Span

Part = Any  # of a state that belongs to one layer: a sequence of arrays (None: not there yet), or a number of tokens


@dataclass(frozen=True)
class Snapshot:
    """A moment of a ModelState, of constant size; good for that state and its forks, backwards in time only."""

    counts: tuple[int, ...]
    layers: tuple[Any, ...]
    restores: int  # how often the state had been restored when this was taken
    nbytes: int


class ModelState(Sequence):
    """The state of every layer and the number of tokens read so far. A sequence of layer states, as mlx_lm's caches are."""

    def __init__(self, layers: Iterable[RecurrentState | KVState], options: KVOptions = KVOptions()):  # noqa: B008 - frozen
        self.layers = options.apply(layers)
        self.options = options
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
        """Bytes that stay the same however long the context is: recurrent layers and attention windows."""
        return sum(layer.nbytes for layer in self.layers if isinstance(layer, RecurrentState))

    @property
    def kv_nbytes(self) -> int:
        """Bytes that grow with the context."""
        return sum(layer.nbytes for layer in self.layers if isinstance(layer, KVState))

    @property
    def nbytes(self) -> int:
        return self.recurrent_nbytes + self.kv_nbytes

    def nbytes_with(self, tokens: int) -> int:
        """Bytes that this state will hold after ``tokens`` tokens; known after the first token."""
        return sum(layer.nbytes_with(tokens) if isinstance(layer, KVState) else layer.nbytes for layer in self.layers)

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
        for i, layer in enumerate(self.layers):
            if isinstance(layer, KVState) and layer.length != self.offset:
                raise StateError(f"layer {i} of this state holds {layer.length} tokens, but the state {self.offset}")
        before = [layer.snapshot() for layer in self.layers]
        try:
            yield
        except BaseException:
            for layer, part in zip(self.layers, before):
                layer.restore(part)
            raise
        self.counts = tuple(start + count for start, count in zip(span.starts, span.counts))
        for layer in self.layers:
            if isinstance(layer, KVState):
                layer.length = min(layer.length, self.offset)  # without the padding behind the longest row

    def adopt(self, options: KVOptions) -> None:
        """Keep attention's context as ``options`` say; only before the first token."""
        if self.counts:
            raise StateError(f"this state holds {self.offset} tokens: how they are stored cannot change any more")
        self.layers, self.options = options.apply(self.layers), options

    def reset(self) -> None:
        """Forget everything."""
        for layer in self.layers:
            layer.reset()
        self.counts = ()
        self._restored_to.append(())

    def fork(self) -> ModelState:
        """Another state that has read the same tokens. They share memory until they read on; snapshots serve both."""
        twin = copy.copy(self)
        twin.layers = [layer.fork() for layer in self.layers]
        twin._restored_to = list(self._restored_to)
        return twin

    def reserve(self, tokens: int) -> None:
        """Let growing caches make room for ``tokens`` at once when they grow next."""
        for layer in self.layers:
            if isinstance(layer, KVState):
                layer.reserve(tokens)

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

    # Files

    def dump(self, snapshots: Sequence[Snapshot] = ()) -> list[list[Part]]:
        """What a file has to keep of this state and of its snapshots: for each, every layer's arrays, or its number of tokens."""
        return [[layer.dump() for layer in self.layers], *(list(one.layers) for one in snapshots)]

    def load(self, parts: list[list[Part]], length: int, positions: Sequence[int] = ()) -> list[Snapshot]:
        """The reverse of :meth:`dump`, for one row of ``length`` tokens; returns the snapshots, taken after ``positions`` tokens."""
        own, *others = parts
        for layer, part in zip(self.layers, own):
            layer.load(part, length)
        self.counts = (length,)
        return [self._snapshot_of(layers, position) for layers, position in zip(others, positions)]

    def _snapshot_of(self, layers: Sequence[Part], position: int) -> Snapshot:
        layers = tuple(part if isinstance(part, int) else tuple(part) for part in layers)
        arrays = [array for part in layers if not isinstance(part, int) for array in part if array is not None]
        return Snapshot((position,), layers, 0, sum(array.nbytes for array in arrays))


def _covers(counts, wanted) -> bool:
    return len(wanted) <= len(counts) and all(have >= want for have, want in zip(counts, wanted))
