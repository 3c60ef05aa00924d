"""The steps that a layout may name, on MLX arrays. All are lazy, and all but ``add`` and ``rising_share`` only move numbers."""

from __future__ import annotations

import mlx.core as mx

from ..cuts import Cut, Deal
from ..layout import Take


def stack(arrays):
    return [mx.stack(arrays)]


def concat(arrays, axis=0):
    return [mx.concatenate(arrays, axis=axis)]


def add(arrays, number):
    """In float32, where the sum of a bfloat16 weight and 1 is exact for all that matters."""
    return [array.astype(mx.float32) + number for array in arrays]


def move_axis(arrays, source, target):
    return [mx.moveaxis(array, source, target) for array in arrays]


def squeeze(arrays, axis):
    return [mx.squeeze(array, axis) for array in arrays]


def reshape(arrays, *shape):
    return [array.reshape(*shape) for array in arrays]


def cut(arrays, axis, first, last):
    """The entries ``first`` to ``last`` (excluded)."""
    return [mx.take(array, mx.arange(first, last), axis=axis) for array in arrays]


def part(arrays, axis, index, count):
    """The ``index``-th of ``count`` equal parts."""
    return [mx.split(array, count, axis=axis)[index] for array in arrays]


def ungroup(arrays, groups, sizes, wanted):
    """Rows stored group by group, [groups][sizes[0] rows, sizes[1] rows, ...]: all groups' ``wanted`` pieces, piece by piece."""
    result = []
    for array in arrays:
        grouped = array.reshape(groups, -1, *array.shape[1:])
        edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        pieces = [grouped[:, edges[i] : edges[i + 1]].reshape(-1, *array.shape[1:]) for i in wanted]
        result.append(mx.concatenate(pieces, axis=0))
    return result


def rising_share(arrays, index):
    """Row ``index`` of the running sum of softmax(rows), counted from row 0's: HGRN2's lower bounds, in float32."""
    shares = [mx.softmax(array.astype(mx.float32), axis=0) for array in arrays]
    return [mx.cumsum(share, axis=0)[index] - share[0] for share in shares]


STEPS = {f.__name__: f for f in (stack, concat, add, move_axis, squeeze, reshape, cut, part, rising_share, ungroup)}


def keeps_rows(take: Take, ndim: int) -> bool:
    """Whether row ``i`` of the result comes from row ``i`` of the one source, which has ``ndim`` axes."""
    return all(name == "part" and -ndim < rest[0] < 0 for name, *rest in take.steps) and len(take.sources) == 1


def moves_rows(take: Take) -> bool:
    """Whether the steps leave the last axis alone, so that they hold for packed weights and for their scales alike."""
    return all(name in ("stack", "ungroup") or (name == "part" and rest[0] == -2) for name, *rest in take.steps)


def apply(take: Take, arrays: list[mx.array]) -> mx.array:
    """The tensor that ``take`` describes, from its sources in order."""
    for name, *arguments in take.steps:
        arrays = STEPS[name](arrays, *arguments)
    (array,) = arrays
    return array


def cut_out(array: mx.array, cut: Cut | None, deal: Deal) -> mx.array:
    """What one rank has of a parameter; a Cut without blocks leaves it to the first rank, and zeros to the others."""
    if cut is None:
        return array
    if not cut.blocks:
        return array if deal.rank == 0 else mx.zeros_like(array)
    axis = array.ndim + cut.axis
    before = (slice(None),) * axis
    pieces = [array[(*before, slice(first, end))] for first, end in cut.ranges(deal, array.shape[axis])]
    return mx.concatenate(pieces, axis=axis)
