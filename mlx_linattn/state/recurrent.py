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

    def dump(self) -> list[mx.array | None]:
        """What a file has to keep."""
        return list(self.arrays)

    def load(self, arrays: list[mx.array | None], length: int) -> None:
        """The reverse of :meth:`dump`, after ``length`` tokens."""
        self.arrays = list(arrays)
