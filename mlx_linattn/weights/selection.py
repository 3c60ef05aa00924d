"""Which entries of stored tensors make up a part of a parameter: the steps of a Take, walked backwards.

A selection is a few ranges of one axis. Where a step does not lead one back to the other, Whole is raised: then all of the
tensor is read, and cut afterwards. That is never wrong, only slower, and takes one tensor's memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from ..layout import Take
from .transform import STEPS


class Whole(Exception):
    """This part of a parameter is not a part of a stored tensor."""


@dataclass(frozen=True)
class Selection:
    axis: int  # from the front
    ranges: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        return sum(end - first for first, end in self.ranges)

    def moved(self, by: int) -> Selection:
        return Selection(self.axis, tuple((first + by, end + by) for first, end in self.ranges))

    def scaled(self, by: int) -> Selection:
        return Selection(self.axis, tuple((first * by, end * by) for first, end in self.ranges))

    def packed(self, length: int, block: int) -> Selection:
        """The same of an axis that stores ``block`` of its ``length`` entries as one (a scale for each block, say); may raise Whole."""
        if any(first % block or (end % block and end != length) for first, end in self.ranges):
            raise Whole
        return Selection(self.axis, tuple((first // block, -(-end // block)) for first, end in self.ranges))


def backwards(take: Take, arrays: list[mx.array], wanted: Selection) -> tuple[Take, list[Selection]]:
    """What of each source makes ``wanted`` of what ``take`` makes, and how; ``arrays``, the sources, are only asked for shapes."""
    stages = [arrays]
    for name, *arguments in take.steps:
        stages.append(STEPS[name](stages[-1], *arguments))
    selections, steps = [wanted] * len(stages[-1]), []
    for (name, *arguments), before in zip(reversed(take.steps), reversed(stages[:-1])):
        if name not in BACK:
            raise Whole
        if len(selections) == len(before):
            found = [BACK[name](one, [array], *arguments) for one, array in zip(selections, before)]
            selections, (arguments, *others) = [one for (one,), _ in found], [rest for _, rest in found]
            if any(other != arguments for other in others):
                raise Whole
        else:
            selections, arguments = BACK[name](selections[0], before, *arguments)
        steps.append((name, *arguments))
    return Take(take.sources, *reversed(steps), given=take.given), selections


def _stack(wanted, arrays):
    if wanted.axis == 0:
        raise Whole
    return [Selection(wanted.axis - 1, wanted.ranges)] * len(arrays), ()


def _concat(wanted, arrays, axis=0):
    if wanted.axis != axis % arrays[0].ndim:
        return [wanted] * len(arrays), (axis,)
    found, first = [], 0
    for array in arrays:
        found.append(_inside(wanted, first, first + array.shape[axis]))
        first += array.shape[axis]
    return found, (axis,)


def _inside(wanted: Selection, first: int, end: int) -> Selection:
    """What of ``wanted`` lies between two entries, counted from the first of them."""
    both = [(max(a, first), min(b, end)) for a, b in wanted.ranges]
    return Selection(wanted.axis, tuple((a, b) for a, b in both if a < b) or ((first, first),)).moved(-first)


def _add(wanted, arrays, number):
    return [wanted], (number,)


def _move_axis(wanted, arrays, source, target):
    order = list(range(arrays[0].ndim))
    axis = order.pop(source)
    order.insert(target % arrays[0].ndim, axis)
    return [Selection(order[wanted.axis], wanted.ranges)], (source, target)


def _squeeze(wanted, arrays, axis):
    return [Selection(wanted.axis + (wanted.axis >= axis % arrays[0].ndim), wanted.ranges)], (axis,)


def _reshape(wanted, arrays, *shape):
    if len(shape) != 3 or arrays[0].ndim != 2 or wanted.axis:
        raise Whole
    return [wanted.scaled(shape[1])], (wanted.size, *shape[1:])  # [heads * rows, n] -> [heads, rows, n]


def _cut(wanted, arrays, axis, first, last):
    if wanted.axis != axis % arrays[0].ndim:
        return [wanted], (axis, first, last)
    return [wanted.moved(first)], (axis, 0, wanted.size)


def _part(wanted, arrays, axis, index, count):
    if wanted.axis != axis % arrays[0].ndim:
        return [wanted], (axis, index, count)
    return [wanted.moved(arrays[0].shape[axis] // count * index)], (axis, 0, 1)


def _ungroup(wanted, arrays, groups, sizes, pieces):
    if wanted.axis:
        return [wanted], (groups, sizes, pieces)
    edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    if groups == 1 and len(pieces) == 1:
        return [wanted.moved(edges[pieces[0]])], (1, (wanted.size,), (0,))
    found, first = set(), 0
    for piece in pieces:
        end = first + groups * sizes[piece]
        ranges = _inside(wanted, first, end).ranges
        if len(ranges) != 1 or any(edge % sizes[piece] for edge in ranges[0]):
            raise Whole
        found.add(tuple(edge // sizes[piece] for edge in ranges[0]))
        first = end
    if len(found) > 1:  # not the same groups of each piece
        raise Whole
    ((first, end),) = found
    return [Selection(0, ((first * edges[-1], end * edges[-1]),))], (end - first, sizes, pieces)


BACK = {
    "stack": _stack, "concat": _concat, "add": _add, "move_axis": _move_axis, "squeeze": _squeeze, "reshape": _reshape,
    "cut": _cut, "part": _part, "ungroup": _ungroup,
}  # fmt: skip
