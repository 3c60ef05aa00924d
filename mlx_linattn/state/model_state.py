from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import mlx.core as mx

from ..errors import StateError
from .kv import KVPiece, KVState
from .options import KVOptions
from .recurrent import RecurrentState
from .span import Span

LARGE = 64 << 20  # bytes of keys and values
Part = Any  # of a state, of one layer: a sequence of arrays (None: not there yet), or a number of tokens


@dataclass(frozen=True)
class Snapshot:
    """A moment of a ModelState, of constant size; good for that state, its forks, and states of the same rows, backwards in time only."""

    counts: tuple[int, ...]
    layers: tuple[Any, ...]
    lineages: tuple[tuple, ...]  # the state's, when this was taken
    nbytes: int


class ModelState(Sequence):
    """The state of every layer and the number of tokens read so far. A sequence of layer states, as mlx_lm's caches are."""

    can_be_cut = True  # whether cut() and assemble() have the whole of it

    def __init__(self, layers: Iterable[RecurrentState | KVState], options: KVOptions = KVOptions()):  # noqa: B008 - frozen
        self.layers = options.apply(layers)
        self.options = options
        self.counts: tuple[int, ...] = ()  # tokens read, a row each; empty before the first token
        # Of each row an object that stands for its first token, and the positions that it went back to since.
        self.lineages: tuple[tuple, ...] = ()

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
        """Bytes that all of it holds."""
        return self.recurrent_nbytes + self.kv_nbytes

    @property
    def must_wait(self) -> bool:
        """Whether a token had better not begin before the one before it has ended.

        MLX writes into a cache in place, but copies one that somebody still reads, and what is under way reads it. For a large
        one the copy takes longer than a device's moment without work, and twice the memory.
        """
        return self.kv_nbytes > LARGE

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
        self._begin(tuple(start + count for start, count in zip(span.starts, span.counts)))
        for layer in self.layers:
            if isinstance(layer, KVState):
                layer.length = min(layer.length, self.offset)  # without the padding behind the longest row

    def _begin(self, counts: tuple[int, ...]) -> None:
        self.counts = counts
        self.lineages = self.lineages or tuple((object(),) for _ in counts)

    def dump(self, snapshots: Iterable[Snapshot] = ()) -> list[list[Part]]:
        """What a file has to keep of this state, and of its snapshots: of every layer its arrays, or its number of tokens."""
        return [[layer.dump() for layer in self.layers], *(list(one.layers) for one in snapshots)]

    def load(
        self, layers: Iterable[Part], length: int, snapshots: Iterable[tuple[Sequence[Part], int]] = ()
    ) -> list[Snapshot]:
        """Hold one row of ``length`` tokens, as :meth:`dump` gave them; returns the snapshots, each given with its length."""
        self.reset()
        for layer, arrays in zip(self.layers, layers):
            layer.load(arrays, length)
        self._begin((length,))
        return [self._snapshot_of(layers, position) for layers, position in snapshots]

    def _snapshot_of(self, layers: Sequence[Part], position: int) -> Snapshot:
        layers = tuple(part if isinstance(part, int) else tuple(part) for part in layers)
        arrays = [array for part in layers if not isinstance(part, int) for array in part if array is not None]
        return Snapshot((position,), layers, self.lineages, sum(array.nbytes for array in arrays))

    def adopt(self, options: KVOptions) -> None:
        """Keep attention's context as ``options`` say; only before the first token."""
        if self.counts:
            raise StateError(f"this state holds {self.offset} tokens: how they are stored cannot change any more")
        self.layers, self.options = options.apply(self.layers), options

    def reset(self) -> None:
        """Forget everything."""
        for layer in self.layers:
            layer.reset()
        self.counts, self.lineages = (), ()

    def fork(self) -> ModelState:
        """Another state that has read the same tokens. They share memory until they read on; snapshots serve both."""
        twin = copy.copy(self)
        twin.layers = [layer.fork() for layer in self.layers]
        return twin

    def become(self, twin: ModelState) -> None:
        """Hold what ``twin``, a fork that has read on, holds; it is not to be used any more."""
        self.layers, self.counts, self.lineages = twin.layers, twin.counts, twin.lineages

    def take(self, rows: Sequence[int]) -> ModelState:
        """Another state that holds these rows alone, in this order, and nothing of the others.

        Snapshots of the same rows serve it, also those from before they were joined. Raises StateError for a row that is not here.
        """
        rows = list(rows)
        if not set(rows) <= set(range(len(self.counts))):
            raise StateError(f"cannot take the rows {rows} of a state that holds {len(self.counts)}")
        twin = self.fork()
        if not rows:
            twin.reset()
        elif rows != list(range(len(self.counts))):
            twin.counts = tuple(self.counts[row] for row in rows)
            twin.lineages = tuple(self.lineages[row] for row in rows)
            twin.layers = [layer.take(rows, twin.offset) for layer in self.layers]
        return twin

    def join(self, *others: ModelState) -> ModelState:
        """Another state that holds our rows and then those of ``others``; the rows can hold different numbers of tokens.

        Raises StateError where one of them is another model's, or keeps attention's context in another way.
        """
        for other in others:
            self.check_fits(other)
        states = [state for state in (self, *others) if state.counts]
        twin = states[0].fork() if states else self.fork()
        if len(states) > 1:
            twin.counts = tuple(count for state in states for count in state.counts)
            twin.lineages = tuple(lineage for state in states for lineage in state.lineages)
            twin.layers = [first.join(rest) for first, *rest in zip(*states)]
        return twin

    def check_fits(self, other: ModelState) -> None:
        """Raises StateError where ``other``'s rows could not be kept in one state with ours."""
        if self.options != other.options:
            raise StateError(f"cannot join states that keep their context differently: {self.options}, {other.options}")
        for i, (ours, theirs) in enumerate(zip_longest(self.layers, other.layers)):
            both = self.counts and other.counts
            if type(ours) is not type(theirs) or (both and ours.layout != theirs.layout):
                raise StateError(
                    f"cannot join these states: they differ in layer {i}, so one of them is another model's"
                )

    def reserve(self, tokens: int) -> None:
        """Let growing caches make room for ``tokens`` at once when they grow next."""
        for layer in self.layers:
            if isinstance(layer, KVState):
                layer.reserve(tokens)

    def skip(self, tokens: int, room: int = 0) -> None:
        """Stand ``tokens`` further, with zeros in place of keys and values: a state of that length, to measure with.

        To be used after the first token; ``room``: tokens to reserve behind them.
        """
        end = self.offset + tokens
        self.reserve(end + room)
        for layer in self.layers:
            if isinstance(layer, KVState):
                layer.length = end  # its buffers grow with the next token, as far as was reserved
        self.counts = (end,)

    def snapshot(self) -> Snapshot:
        """This moment, for :meth:`restore`; it copies nothing."""
        layers = tuple(layer.snapshot() for layer in self.layers)
        return Snapshot(self.counts, layers, self.lineages, self.recurrent_nbytes)

    def cut(self, begin: int, end: int) -> list[KVPiece]:
        """What growing caches hold of the tokens ``begin`` to ``end``, in memory of its own. For a state of one row."""
        return [layer.cut(begin, end) for layer in self.layers if isinstance(layer, KVState)]

    def assemble(self, layers: Sequence[Any], pieces: Sequence[Sequence[KVPiece]], length: int) -> None:
        """Hold what another state of one row held after ``length`` tokens: the ``layers`` of its snapshot, and what :meth:`cut`
        gave of its tokens, in order."""
        caches = iter(zip(*pieces))
        arrays = (
            KVPiece.join(next(caches)) if isinstance(layer, KVState) else list(part)
            for layer, part in zip(self.layers, layers)
        )
        self.load(arrays, length)

    def reaches(self, snapshot: Snapshot) -> bool:
        """Whether these rows were there, and no restore since then went back behind them: their keys and values still are."""
        if not snapshot.counts:
            return True
        rows = zip(self.counts, self.lineages, snapshot.counts, snapshot.lineages)
        return len(self.counts) == len(snapshot.counts) and all(
            now[: len(then)] == then and min((have, *now[len(then) :])) >= wanted for have, now, wanted, then in rows
        )

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
        pairs = zip(self.lineages, snapshot.counts)
        self.lineages = tuple((*lineage, position) for lineage, position in pairs)
