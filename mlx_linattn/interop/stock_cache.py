"""A whole ModelState as one of mlx_lm's caches: what its generate, BatchGenerator and server do with a cache's rows.

mlx_lm keeps a list of caches, one for each layer, and calls the same methods on every one of them. Here the list has one
entry that stands for all layers, so that they agree on how many tokens each row has read.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..model import Model
from ..state import KVOptions, KVState, ModelState, RecurrentState, WindowState

RECURRENT, KV, WINDOW = range(3)  # in files


class ModelStateCache:
    """The rows of ``model_state``; they can have read different numbers of tokens. ``model``, before any has, made it."""

    meta_state = ""  # what mlx_lm before 0.32 asks for besides ``state``

    def __init__(self, model_state: ModelState, model: Model | None = None):
        self.model_state, self.model = model_state, model
        self._left: list[int] | None = None  # tokens that each row has still to read of a padded prompt

    def read(self, model: Model, ids: mx.array) -> mx.array:
        """Logits [B, T, V] of ``ids`` [B, T] as ``model`` reads them after this state."""
        lengths = None
        if self._left is not None:
            lengths = [min(left, ids.shape[1]) for left in self._left]
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
        return ModelStateCache(self.model_state.fork(), self.model)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> ModelStateCache:
        """Keep attention's keys and values in ``bits`` bits, those of all tokens so far too."""
        options = KVOptions(kv_bits=bits, kv_group_size=group_size)
        if self.model_state.options != options:
            (length,) = self.model_state.counts
            quantized = ModelState([_made(*_kind(layer)) for layer in self.model_state], options)
            quantized.load([_packed(*layers) for layers in zip(self.model_state, quantized)], length)
            self.model_state = quantized
        return self

    # Rows

    def prepare(self, *, lengths: Sequence[int] | None = None, **_) -> None:
        """The next calls read ``lengths`` tokens of each row, which are padded on the right."""
        self._left = None if lengths is None else list(lengths)

    def finalize(self) -> None:
        self._left = None

    def filter(self, keep: Sequence[int]) -> None:
        """Keep the rows ``keep``, in this order."""
        self.model_state = self.model_state.take([int(row) for row in keep])

    def extract(self, row: int) -> ModelStateCache:
        """A cache of one row."""
        return ModelStateCache(self.model_state.take([row]))

    def extend(self, other: ModelStateCache) -> None:
        """Put the rows of ``other`` below."""
        self.model_state = self.model_state.join(other.model_state)

    @staticmethod
    def merge(caches: Sequence[ModelStateCache]) -> ModelStateCache:
        """One cache of all rows of ``caches``."""
        first, *others = (cache._begun() for cache in caches)
        return ModelStateCache(first.join(*others))

    def _begun(self) -> ModelState:
        """The state with a row even where it has read nothing."""
        if self.model_state.counts:
            return self.model_state
        state = self.model_state.fork()
        self.model.hidden_states(mx.array([[0]]), state, lengths=[0])  # padding alone, which changes nothing
        return state

    # Files

    @property
    def state(self) -> list:
        """Arrays alone: the count and how attention keeps its context, then what each layer is and what it holds."""
        options = self.model_state.options
        head = mx.array([self.offset, options.kv_bits or 0, options.kv_group_size])
        return [head, *([mx.array(_kind(layer)), *layer.dump()] for layer in self.model_state)]

    @classmethod
    def from_state(cls, state: list, meta_state: str = "") -> ModelStateCache:
        """The reverse, for a cache of one row."""
        head, *layers = state
        count, bits, group_size = head.tolist()
        model_state = ModelState(
            [_made(*kind.tolist()) for kind, *_ in layers], KVOptions(kv_bits=bits or None, kv_group_size=group_size)
        )
        model_state.load([arrays for _, *arrays in layers], count)
        return cls(model_state)


def _kind(layer: RecurrentState | KVState) -> list[int]:
    if isinstance(layer, WindowState):
        return [WINDOW, layer.window, layer.sinks]
    return [KV] if isinstance(layer, KVState) else [RECURRENT, len(layer.arrays)]


def _made(kind: int, *numbers: int) -> RecurrentState | KVState:
    return (RecurrentState, KVState, WindowState)[kind](*numbers)


def _packed(layer, like) -> list[mx.array | None]:
    """What ``layer`` holds, as ``like`` keeps it."""
    quantization = getattr(like, "quantization", None)
    if quantization is None:
        return layer.dump()
    return [part for array in layer.dump() for part in quantization.pack(array)]
