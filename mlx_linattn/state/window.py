from __future__ import annotations

import mlx.core as mx

from .kv import put
from .recurrent import RecurrentState
from .span import Span


class WindowState(RecurrentState):
    """What an attention layer keeps of the last ``window`` tokens of each row and of the first ``sinks``, in arrays that never grow.

    Position p lies in slot p while p < sinks, and in slot sinks + (p - sinks) % window afterwards. Every token makes new arrays
    (in the old ones' memory, unless a snapshot holds them), so that a snapshot is a few references.
    """

    def __init__(self, window: int, sinks: int = 0):
        super().__init__(0)
        self.window, self.sinks = window, sinks

    @property
    def size(self) -> int:
        """Slots: no query sees more columns than these."""
        return self.sinks + self.window

    @property
    def layout(self) -> tuple:
        return (self.window, self.sinks, *super().layout)

    def reset(self) -> None:
        self.arrays = []

    def append(self, span: Span, *new: mx.array):
        """Store [B, heads, T, D] arrays; returns the columns of each, and what :func:`ops.attention` must know about them."""
        if not self.arrays:
            self.arrays = [mx.zeros((*x.shape[:2], self.size, x.shape[3]), x.dtype) for x in new]
        if span.T == 1 and span.lengths is None:
            return self._append_one(span, new)
        starts, counts = mx.array(span.starts)[:, None], mx.array(span.counts)[:, None]
        held, last = self._positions(starts), self._positions(starts + counts)
        arrived = (last >= starts) & (last >= 0)
        # For each slot its column among the old slots and, behind them, the new tokens.
        kept = mx.where(arrived, self.size + last - starts, mx.arange(self.size))[:, None, :, None]
        columns = []
        for i, x in enumerate(new):
            both = mx.concatenate([self.arrays[i], x], axis=2)
            self.arrays[i] = mx.take_along_axis(both, kept, axis=2)
            columns.append(both)
        positions = mx.concatenate([held, starts + mx.arange(span.T)], axis=1)
        return columns, {"starts": span.starts, "positions": positions, "window": self.window, "sinks": self.sinks}

    def _positions(self, ends):
        """[B, size]: the position that each slot holds after ``ends`` [B, 1] tokens, -1 where it is empty."""
        slots = mx.arange(self.size)
        behind = ends - 1 - self.sinks  # the newest token, counted from the first one behind the sinks
        ring = behind - (behind - (slots - self.sinks)) % self.window
        ring = mx.where(ring >= 0, ring + self.sinks, -1)
        return mx.where(slots < self.sinks, mx.where(slots < ends, slots, -1), ring)

    def _append_one(self, span: Span, new):
        """One token for each row: it overwrites one slot, and then every slot in use is visible, whatever its order."""
        sinks, window = self.sinks, self.window
        slots = [start if start < sinks else sinks + (start - sinks) % window for start in span.starts]
        even = len(set(slots)) == 1
        for i, x in enumerate(new):
            if even:
                self.arrays[i] = put(self.arrays[i], x, slots[0])
            else:
                index = mx.broadcast_to(mx.array(slots)[:, None, None, None], x.shape)
                self.arrays[i] = mx.put_along_axis(self.arrays[i], index, x, axis=2)
        last = tuple(min(start, self.size - 1) for start in span.starts)
        columns = max(last) + 1
        seen = {"starts": last, "mask": span.mask(last, columns)}
        return [array[:, :, :columns] for array in self.arrays], seen
