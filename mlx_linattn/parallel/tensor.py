"""Tensor parallel: each rank has a share of every layer, and their outputs are summed."""

from __future__ import annotations

import logging
from types import ModuleType

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from ..cuts import Cut, Deal
from ..errors import ParallelError
from ..layout import unprefixed
from ..model import Model
from ..state import ModelState, Snapshot
from ..weights import Checkpoint
from ..weights.transform import cut_out
from .arrangement import Arrangement, restored
from .group import Group
from .plan import Share, stored_groups, tensor_plan

log = logging.getLogger(__name__)


class Tensor(Arrangement):
    """One rank's share of all layers that are dealt out, and the others whole."""

    def __init__(self, share: Share, group: Group):
        self.share, self.plan, self.group = share, share.plan, group

    @classmethod
    def of(cls, checkpoint: Checkpoint, family: ModuleType, group: Group) -> Tensor:
        spec = family.spec(checkpoint.config)
        shapes = {unprefixed(name, family.PREFIXES): info.shape for name, info in checkpoint.tensors.items()}
        packed = stored_groups(dict(family.names(spec)), shapes if checkpoint.is_mlx else {})
        plan = tensor_plan(spec, group.size, packed)
        if not any(name.startswith("layers.") for name in plan.cuts):
            raise ParallelError(
                f"this model cannot be dealt out to {group.size} ranks ({'; '.join(plan.left_whole())}): use another number of "
                "them, or --parallel pipeline, which cuts it between its layers"
            )
        if plan.whole and group.rank == 0:
            log.warning("every rank has whole: %s", "; ".join(plan.left_whole()))
        return cls(plan.share(group.rank), group)

    def connect(self, model: Model) -> None:
        self.plan.connect(model, self.group)

    def tell(self, numbers: mx.array) -> mx.array:
        """The first rank adds its numbers to the others' zeros: so messages and layers' sums keep one order on all ranks."""
        return self.group.sum(numbers)

    def hear(self, size: int) -> mx.array:
        return self.group.sum(mx.zeros((size,), mx.int32))

    def dumped(self, state: ModelState, snapshots: list[Snapshot]) -> list:
        merged: dict[int, mx.array] = {}  # what two snapshots share, they share afterwards too

        def one(array: mx.array | None, cut: Cut | None) -> mx.array | None:
            if array is not None and id(array) not in merged:
                merged[id(array)] = whole(array, cut, self.group)
            return None if array is None else merged[id(array)]

        parts = ModelState.dump(state, snapshots)
        return [
            [
                part if isinstance(part, int) else [one(*pair) for pair in zip(part, self.plan.state_cuts(i))]
                for i, part in enumerate(layers)
            ]
            for layers in parts
        ]

    def loaded(
        self, state: ModelState, layout: list, kinds: list, lengths: list[int], arrays: list[mx.array | None]
    ) -> list[Snapshot]:
        cuts = {}
        for layers in layout:
            for i, part in enumerate(layers):
                if not isinstance(part, int):
                    for x, cut in zip(part, self.plan.state_cuts(i)):
                        cuts.setdefault(x, cut)
        shares = [
            own(x, shape, getattr(mx, dtype), cuts[n], self.group)
            for n, (x, (dtype, shape)) in enumerate(zip(arrays, kinds))
        ]
        now, *moments = restored(layout, shares)
        return ModelState.load(state, now, lengths[0], list(zip(moments, lengths[1:])))

    def sampled(self, model: Model, count: int) -> list[tuple[str, mx.Dtype, tuple[int, ...], mx.array]]:
        names, samples = [], {True: [], False: []}  # floating or not
        for name, array in sorted(tree_flatten(model.parameters())):
            cut = self.plan.cut(name)
            shape = list(array.shape)
            if cut is not None and cut.blocks:
                axis = array.ndim + cut.axis
                here = sum(end - first for first, end in cut.ranges(Deal(0, self.group.size)))
                shape[axis] = array.shape[axis] * cut.size // here
            floating = mx.issubdtype(array.dtype, mx.floating)
            sample = _sample(array, tuple(shape), cut, self.group.deal, count)
            samples[floating].append(sample.astype(mx.float32 if floating else mx.int64))
            names.append((name, array.dtype, tuple(shape), floating, sample.size))
        sums = {}
        for floating, parts in samples.items():
            if parts:
                sums[floating] = self.group.sum(mx.concatenate(parts))
                mx.eval(sums[floating])
        places, found = {True: 0, False: 0}, []
        for name, dtype, shape, floating, size in names:
            first = places[floating]
            found.append((name, dtype, shape, sums[floating][first : first + size]))
            places[floating] += size
        return found


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
