"""How the ranks share a model: what the first rank and the others ask of it, whichever way it is."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import mlx.core as mx

from ..model import Model
from ..state import ModelState, Snapshot
from ..weights import Checkpoint
from .group import Group


class Arrangement:
    """One rank's side of it. All ranks go through the same methods in the same order, but for ``tell`` and ``hear``."""

    group: Group
    share: Any  # what this rank has of the model, as load_weights takes it

    @classmethod
    def of(cls, checkpoint: Checkpoint, family: ModuleType, group: Group) -> Arrangement:
        """For the model in ``checkpoint``. Raises ParallelError where so many ranks cannot share it."""
        raise NotImplementedError

    def connect(self, model: Model) -> None:
        """Let a model that has this rank's weights know the others."""
        raise NotImplementedError

    def tell(self, numbers: mx.array) -> mx.array:
        """On the first rank: int32 numbers, which go to all others as they are evaluated."""
        raise NotImplementedError

    def hear(self, size: int) -> mx.array:
        """On the others: as many numbers that the first rank tells."""
        raise NotImplementedError

    def start(self, message: mx.array, hidden: mx.array | None, arrays: list[mx.array]) -> list[mx.array]:
        """On the first rank: begin to evaluate a message and what belongs to it; returns all of it.

        hidden: hidden states, where the message says to make them.  arrays: what else is wanted.
        """
        arrays = [message, *([] if hidden is None else [hidden]), *arrays]
        mx.async_eval(*arrays)
        return arrays

    def dumped(self, state: ModelState, snapshots: list[Snapshot]) -> list:
        """On the first rank: :meth:`ModelState.dump` of the state that the ranks have together."""
        raise NotImplementedError

    def loaded(
        self, state: ModelState, layout: list, kinds: list, lengths: list[int], arrays: list[mx.array | None]
    ) -> list[Snapshot]:
        """:meth:`ModelState.load` of this rank's share, and its snapshots.

        layout: of the state and then of each snapshot, as :func:`described` gives it; ``lengths``: their tokens.
        kinds: (dtype, shape) of each array.  arrays: whole ones on the first rank, None on the others.
        """
        raise NotImplementedError

    def sampled(self, model: Model, count: int) -> list[tuple[str, mx.Dtype, tuple[int, ...], mx.array]]:
        """On the first rank: :meth:`Model.sampled` of the whole model."""
        raise NotImplementedError


def described(parts: list) -> tuple[list, list[mx.array]]:
    """``parts`` of a dump with numbers in the place of arrays, and the arrays so numbered, each once."""
    arrays: list[mx.array] = []
    numbers: dict[int, int] = {}

    def number(array: mx.array | None) -> int | None:
        if array is not None and id(array) not in numbers:
            numbers[id(array)] = len(arrays)
            arrays.append(array)
        return None if array is None else numbers[id(array)]

    layout = [[part if isinstance(part, int) else [number(x) for x in part] for part in layers] for layers in parts]
    return layout, arrays


def restored(layout: list, arrays: list[mx.array | None]) -> list:
    """The reverse of :func:`described`."""
    return [
        [part if isinstance(part, int) else [None if x is None else arrays[x] for x in part] for part in layers]
        for layers in layout
    ]


def kinds_of(arrays: list[mx.array]) -> list[tuple[str, tuple[int, ...]]]:
    """Names of their dtypes, and their shapes."""
    return [(str(array.dtype).rpartition(".")[2], array.shape) for array in arrays]
