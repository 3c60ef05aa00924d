"""Arrays that are dealt out, put together again, and whole ones dealt out: states on their way to and from a file."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from ..cuts import Cut, Deal
from ..model import Model
from ..state import ModelState, Snapshot
from ..weights.transform import cut_out
from .group import Group
from .plan import Plan


def whole(array: mx.array, cut: Cut | None, group: Group) -> mx.array:
    """The array of which every rank has its share; all ranks have to ask at the same time. Evaluated."""
    if cut is None:
        return array
    axis = array.ndim + cut.axis
    shares = mx.distributed.all_gather(array[None], group=group.group)
    mx.eval(shares)
    before, blocks, offset = (slice(None),) * axis, [], 0
    for block in cut.blocks:
        size = max(block.heads // group.size, 1) * block.width
        owners = range(group.size) if block.heads >= group.size else _first_owners(block.heads, group.size)
        blocks += [shares[rank][(*before, slice(offset, offset + size))] for rank in owners]
        offset += size
    result = mx.contiguous(mx.concatenate(blocks, axis=axis))
    mx.eval(result)
    return result


def _first_owners(heads: int, ranks: int) -> list[int]:
    """Of several ranks with the same head, the first."""
    return [head * ranks // heads for head in range(heads)]


def own(array: mx.array | None, shape, dtype: mx.Dtype, cut: Cut | None, group: Group) -> mx.array:
    """This rank's share of an array that the first rank has; the others give its shape and dtype. Evaluated."""
    everyones = group.sum(mx.zeros(shape, dtype) if array is None else array)
    result = mx.contiguous(cut_out(everyones, cut, group.deal))
    mx.eval(result)
    return result


def dumped(state: ModelState, snapshots: list[Snapshot], plan: Plan, group: Group) -> list:
    """:meth:`ModelState.dump` of the state that the ranks have together; all have to ask at the same time."""
    merged: dict[int, mx.array] = {}  # what two snapshots share, they share afterwards too

    def one(array: mx.array | None, cut: Cut | None) -> mx.array | None:
        if array is not None and id(array) not in merged:
            merged[id(array)] = whole(array, cut, group)
        return None if array is None else merged[id(array)]

    parts = ModelState.dump(state, snapshots)
    return [
        [
            part if isinstance(part, int) else [one(*pair) for pair in zip(part, plan.state_cuts(i))]
            for i, part in enumerate(layers)
        ]
        for layers in parts
    ]


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


def loaded(
    state: ModelState, layout: list, kinds: list, lengths: list[int], arrays: list, plan: Plan, group: Group
) -> list[Snapshot]:
    """:meth:`ModelState.load` of this rank's share, and its snapshots. All ranks have to do so at the same time.

    layout: of the state and then of each snapshot, as :func:`described` gives it; ``lengths``: their tokens.
    kinds: (dtype, shape) of each array.  arrays: whole ones on the first rank, None on the others.
    """
    cuts = {}
    for layers in layout:
        for i, part in enumerate(layers):
            if not isinstance(part, int):
                for x, cut in zip(part, plan.state_cuts(i)):
                    cuts.setdefault(x, cut)
    shares = [
        own(x, shape, getattr(mx, dtype), cuts[n], group) for n, (x, (dtype, shape)) in enumerate(zip(arrays, kinds))
    ]
    parts = [
        [part if isinstance(part, int) else [None if x is None else shares[x] for x in part] for part in layers]
        for layers in layout
    ]
    own_parts, *snapshots = parts
    return ModelState.load(state, own_parts, lengths[0], list(zip(snapshots, lengths[1:])))


def sampled(
    model: Model, plan: Plan, group: Group, count: int
) -> list[tuple[str, mx.Dtype, tuple[int, ...], mx.array]]:
    """:meth:`Model.sampled` of the whole model; all ranks have to ask at the same time."""
    names, samples = [], {True: [], False: []}  # floating or not
    for name, array in sorted(tree_flatten(model.parameters())):
        cut = plan.cut(name)
        shape = list(array.shape)
        if cut is not None and cut.blocks:
            axis = array.ndim + cut.axis
            here = sum(end - first for first, end in cut.ranges(Deal(0, group.size)))
            shape[axis] = array.shape[axis] * cut.size // here
        floating = mx.issubdtype(array.dtype, mx.floating)
        samples[floating].append(
            _sample(array, tuple(shape), cut, group.deal, count).astype(mx.float32 if floating else mx.int64)
        )
        names.append((name, array.dtype, tuple(shape), floating, samples[floating][-1].size))
    sums = {}
    for floating, parts in samples.items():
        if parts:
            sums[floating] = group.sum(mx.concatenate(parts))
            mx.eval(sums[floating])
    places, found = {True: 0, False: 0}, []
    for name, dtype, shape, floating, size in names:
        first = places[floating]
        found.append((name, dtype, shape, sums[floating][first : first + size]))
        places[floating] += size
    return found


def _sample(array: mx.array, shape: tuple[int, ...], cut: Cut | None, deal: Deal, count: int) -> mx.array:
    """What this rank has of ``count`` numbers of the whole array, evenly spread, and zeros for the others'."""
    size = int(np.prod(shape))
    index = np.arange(0, size, max(1, size // count))[:count]
    if cut is None or not cut.blocks:
        values = array.reshape(-1)[mx.array(index)]
        return values if deal.rank == 0 else mx.zeros_like(values)
    axis = len(shape) + cut.axis
    places = list(np.unravel_index(index, shape))
    mine = np.full(shape[axis], -1)  # where an entry of the whole axis lies in this rank's
    offset = 0
    for first, end in cut.ranges(deal, shape[axis]):
        mine[first:end] = np.arange(offset, offset + end - first)
        offset += end - first
    for rank in range(deal.rank):  # what an earlier rank has too is the earlier one's to tell
        for first, end in cut.ranges(Deal(rank, deal.ranks), shape[axis]):
            mine[first:end] = -1
    places[axis] = mine[places[axis]]
    here = places[axis] >= 0
    places[axis] = np.maximum(places[axis], 0)
    values = array.reshape(-1)[mx.array(np.ravel_multi_index(places, array.shape))]
    return mx.where(mx.array(here), values, 0)
