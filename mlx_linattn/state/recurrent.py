from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx


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

    def fork(self):
        """Another state that holds the same arrays; what one of them reads does not show in the other."""
        twin = copy.copy(self)
        twin.arrays = list(self.arrays)
        return twin

    def snapshot(self) -> Any:
        return tuple(self.arrays)

    def restore(self, snapshot: Any) -> None:
        self.arrays = list(snapshot)

    @property
    def layout(self) -> tuple:
        """What two states have in common whose rows can be kept in one: everything but the number of rows."""
        return tuple((array.shape[1:], array.dtype) for array in self.state)

    def take(self, rows: list[int], length: int):
        """Another state that holds these rows, the longest of which has read ``length`` tokens."""
        twin = self.fork()
        twin.arrays = [None if array is None else mx.take(array, mx.array(rows), axis=0) for array in self.arrays]
        return twin

    def join(self, others: list):
        """Another state that holds our rows and then the rows of ``others``."""
        twin = self.fork()
        parts = zip(self.arrays, *(other.arrays for other in others))
        twin.arrays = [None if part[0] is None else mx.concatenate(part) for part in parts]
        return twin

    def dump(self) -> list[mx.array | None]:
        """What a file has to keep."""
        return list(self.arrays)

    def load(self, arrays: list[mx.array | None], length: int) -> None:
        """The reverse of :meth:`dump`, after ``length`` tokens."""
        self.arrays = list(arrays)
