"""A whole ModelState as one of mlx_lm's caches: what its generate, BatchGenerator and server do with a cache's rows.

mlx_lm keeps a list of caches, one for each layer, and calls the same methods on every one of them. Here the list has one
entry that stands for all layers, so that they agree on how many tokens each row has read.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..errors import StateError
from ..state import KVOptions, KVQuantization, KVState, ModelState, RecurrentState, WindowState

RECURRENT, KV, WINDOW = range(3)


class ModelStateCache:
    """``model_state`` with ``rows`` rows. Rows can have read different numbers of tokens, or none."""

    meta_state = ""  # what mlx_lm before 0.32 asks for besides ``state``

    def __init__(self, model_state: ModelState, rows: int = 1):
        self.model_state, self.rows = model_state, rows
        self._left: list[int] | None = None  # tokens that each row has still to read of a padded prompt

    def read(self, model, ids: mx.array) -> mx.array:
        """Logits [B, T, V] of ``ids`` [B, T] as ``model`` reads them after this state."""
        self.rows, T = ids.shape
        if self._left is None:
            return model.logits(model.hidden_states(ids, self.model_state))
        lengths = [min(left, T) for left in self._left]
        self._left = [left - length for left, length in zip(self._left, lengths)]
        return model.logits(model.hidden_states(ids, self.model_state, lengths=lengths))

    # What mlx_lm asks a cache

    @property
    def offset(self) -> int:
        return self.model_state.offset

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return not self.offset

    @property
    def nbytes(self) -> int:
        return self.model_state.nbytes

    def is_trimmable(self) -> bool:
        """A recurrent layer cannot forget its last tokens."""
        return False

    def __deepcopy__(self, memo) -> ModelStateCache:
        return ModelStateCache(self.model_state.fork(), self.rows)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> ModelStateCache:
        """Keep attention's keys and values in ``bits`` bits, those of all tokens so far too."""
        KVOptions(kv_bits=bits, kv_group_size=group_size)  # refuses what MLX has no format for
        quantization = KVQuantization(bits, group_size, 0)
        for layer in self.model_state:
            if isinstance(layer, KVState) and layer.quantization is None:
                parts = [part for array in layer.dump() for part in quantization.pack(array)]
                layer.quantization = quantization
                layer.load(parts, layer.length)
        return self

    # Rows

    def prepare(self, *, lengths: Sequence[int] | None = None, **_) -> None:
        """The next calls read ``lengths`` tokens of each row, which are padded on the right."""
        self._left = None if lengths is None else list(lengths)

    def finalize(self) -> None:
        self._left = None

    def filter(self, keep: Sequence[int]) -> None:
        """Keep the rows ``keep``, in this order."""
        keep = [int(row) for row in keep]
        index, counts = mx.array(keep), tuple(self._counts[row] for row in keep)
        arrays = []
        for layer in self.model_state:
            held = layer.dump()
            if isinstance(layer, KVState):
                held = [array[:, :, : max(counts)] for array in held]
            arrays.append([None if array is None else array[index] for array in held])
        self._replace(arrays, counts)

    def extract(self, row: int) -> ModelStateCache:
        """A cache of one row."""
        one = self.__deepcopy__({})
        one.filter([row])
        return one

    def extend(self, other: ModelStateCache) -> None:
        """Put the rows of ``other`` below."""
        together = self.merge([self, other])
        self.model_state, self.rows = together.model_state, together.rows

    @classmethod
    def merge(cls, caches: Sequence[ModelStateCache]) -> ModelStateCache:
        """One cache of all rows of ``caches``."""
        if len({tuple(map(tuple, map(_kind, cache.model_state))) for cache in caches}) > 1:
            raise StateError(
                "caches that keep their tokens in different ways cannot be rows of one batch: use one kv_bits"
            )
        merged = caches[0].__deepcopy__({})
        counts = tuple(count for cache in caches for count in cache._counts)
        arrays = [
            _below([(cache.model_state[i].dump(), cache.rows) for cache in caches], isinstance(layer, KVState))
            for i, layer in enumerate(merged.model_state)
        ]
        merged._replace(arrays, counts)
        return merged

    @property
    def _counts(self) -> tuple[int, ...]:
        return self.model_state.counts or (0,) * self.rows

    def _replace(self, arrays: list[list[mx.array | None]], counts: tuple[int, ...]) -> None:
        self.rows = len(counts)
        self.model_state.counts = counts if any(counts) else ()
        for layer, parts in zip(self.model_state, arrays):
            if any(counts):
                layer.load(parts, max(counts))
            else:
                layer.reset()

    # Files

    @property
    def state(self) -> list:
        """Arrays alone: the counts, and for each layer what it is and what it holds."""
        return [mx.array(self._counts), *([mx.array(_kind(layer)), *layer.dump()] for layer in self.model_state)]

    @classmethod
    def from_state(cls, state: list, meta_state: str = "") -> ModelStateCache:
        counts = tuple(state[0].tolist())
        cache = cls(ModelState([_made(*kind.tolist()) for kind, *_ in state[1:]]), len(counts))
        cache._replace([list(arrays) for _, *arrays in state[1:]], counts)
        return cache


def _below(parts: list[tuple[list[mx.array | None], int]], columns: bool) -> list[mx.array | None]:
    """Arrays of the same layer of several states, each of so many rows, as arrays of all rows; ``columns``: with as many
    columns as the longest. What is missing is zero: that is how every layer begins."""
    like = max((arrays for arrays, _ in parts), key=lambda arrays: sum(a is not None for a in arrays))
    result: list[mx.array | None] = []
    for i, model in enumerate(like):
        if model is None:
            result.append(None)
            continue
        rows = []
        for arrays, count in parts:
            array = arrays[i] if i < len(arrays) else None
            rows.append(mx.zeros((count, *model.shape[1:]), model.dtype) if array is None else array)
        if columns:
            most = max(array.shape[2] for array in rows)
            rows = [mx.pad(array, [(0, 0), (0, 0), (0, most - array.shape[2]), (0, 0)]) for array in rows]
        result.append(mx.concatenate(rows))
    return result


def _kind(layer: RecurrentState | KVState) -> list[int]:
    if isinstance(layer, WindowState):
        return [WINDOW, layer.window, layer.sinks]
    if isinstance(layer, KVState):
        packed = layer.quantization
        return [KV, *((packed.bits, packed.group_size, packed.start) if packed else ())]
    return [RECURRENT, len(layer.arrays)]


def _made(kind: int, *numbers: int) -> RecurrentState | KVState:
    if kind == WINDOW:
        return WindowState(*numbers)
    if kind == RECURRENT:
        return RecurrentState(*numbers)
    layer = KVState()
    layer.quantization = KVQuantization(*numbers) if numbers else None
    return layer
