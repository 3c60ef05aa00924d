"""Pipeline parallel: each rank has a run of layers, and what they make goes on to the next rank; the last sends it to the first.

All that is said goes round the same way, from each rank to the next, and nobody waits for more than the rank before: while one
reads a piece of a prompt, the rank before it reads the next piece.
"""

from __future__ import annotations

import json
from types import ModuleType

import mlx.core as mx
import mlx.nn as nn

from ..cuts import Uneven
from ..errors import ParallelError
from ..layers import Ranks
from ..layout import unprefixed
from ..model import Model
from ..spec import LayerSpec, ModelSpec
from ..state import ModelState, RecurrentState, Snapshot
from ..weights import Checkpoint, stored_dtype
from .agree import exchange
from .arrangement import Arrangement, described, kinds_of, restored
from .group import Group
from .stages import Stage, part_sizes, stages


class Pipeline(Arrangement):
    """The run of layers of one rank, between the rank before and the next."""

    def __init__(self, stage: Stage, group: Group):
        self.share, self.group = stage, group
        self.is_last = group.rank == group.size - 1

    @classmethod
    def of(cls, checkpoint: Checkpoint, family: ModuleType, group: Group) -> Pipeline:
        spec = family.spec(checkpoint.config)
        stored = {unprefixed(name, family.PREFIXES): info for name, info in checkpoint.tensors.items()}
        sizes = part_sizes(spec, family, stored_dtype(checkpoint.config), stored if checkpoint.is_mlx else None)
        try:
            return cls(Stage(spec, group.deal, stages(sizes, len(spec.layers), group.size)), group)
        except Uneven as error:
            raise ParallelError(f"this model cannot be cut between its layers: {error}; use fewer ranks") from error

    def connect(self, model: Model) -> None:
        dtype = str(model.embed(mx.array([[0]])).dtype).rpartition(".")[2]
        dtype = getattr(mx, exchange(self.group, dtype)[0])  # the others have no embedding to ask
        keep_own(model, self.share, dtype)
        model.ranks = self._passing = Passing(self.share, self.group)

    def tell(self, numbers: mx.array) -> mx.array:
        return self.group.send(numbers)

    def hear(self, size: int) -> mx.array:
        return self._passed_on(self.group.receive((size,), mx.int32))

    def _passed_on(self, x: mx.array) -> mx.array:
        return x if self.is_last else self.group.send(x)

    def start(self, message: mx.array, hidden: mx.array | None, arrays: list[mx.array]) -> list[mx.array]:
        sent, back = ([], []) if hidden is None else self._passing.under_way
        # Apart, since MLX lets one stream wait for all that begins together; and not ``hidden``, which the default stream would wait
        # for: so the next piece of a prompt need not wait for this one to come back.
        for together in ([message, *sent], back, arrays):
            mx.async_eval(*together)
        return [message, *sent, *back, *arrays]

    def dumped(self, state: ModelState, snapshots: list[Snapshot]) -> list:
        own = [layers[self.share.first : self.share.end] for layers in ModelState.dump(state, snapshots)]
        everyones = [restored(layout, arrays) for layout, arrays in self._collected(*described(own))]
        return [[part for layers in moment for part in layers] for moment in zip(*everyones)]

    def loaded(
        self, state: ModelState, layout: list, kinds: list, lengths: list[int], arrays: list[mx.array | None]
    ) -> list[Snapshot]:
        rank, owners = self.group.rank, {}
        for layers in layout:
            for i, part in enumerate(layers):
                for x in [] if isinstance(part, int) else part:
                    owners[x] = self.share.owner(i)
        own = list(arrays)
        for n, (dtype, shape) in enumerate(kinds):
            if rank and owners[n] >= rank:
                own[n] = self.group.receive(shape, getattr(mx, dtype))
                mx.eval(own[n])
            if owners[n] > rank:
                mx.eval(self.group.send(own[n]))
            if owners[n] != rank:
                own[n] = None
        here = range(self.share.first, self.share.end)
        now, *moments = (
            [part if i in here else [] for i, part in enumerate(layers)] for layers in restored(layout, own)
        )
        return ModelState.load(state, now, lengths[0], list(zip(moments, lengths[1:])))

    def sampled(self, model: Model, count: int) -> list[tuple[str, mx.Dtype, tuple[int, ...], mx.array]]:
        own = Model.sampled(model, count)
        said = [(name, str(dtype).rpartition(".")[2], shape) for name, dtype, shape, _ in own]
        return sorted(
            (name, getattr(mx, dtype), tuple(shape), sample)
            for names, samples in self._collected(said, [sample for *_, sample in own])
            for (name, dtype, shape), sample in zip(names, samples)
        )

    def _collected(self, said, arrays: list[mx.array]) -> list[tuple[object, list[mx.array]]]:
        """What every rank says, in their order, with its arrays, on the first rank; on the others nothing.

        Each rank passes on what came from the ranks before it, and then its own.
        """
        if self.group.rank == 0:
            return [(said, arrays), *(self._received() for _ in range(1, self.group.size))]
        for _ in range(1, self.group.rank):
            self._sent(*self._received())
        self._sent(said, arrays)
        return []

    def _sent(self, said, arrays: list[mx.array]) -> None:
        arrays = [mx.contiguous(array) for array in arrays]
        text = json.dumps([said, kinds_of(arrays)]).encode()
        for x in (mx.array([len(text)], mx.int32), mx.array(list(text), mx.uint8), *arrays):
            mx.eval(self.group.send(x))

    def _received(self) -> tuple[object, list[mx.array]]:
        (length,) = self.group.receive((1,), mx.int32).tolist()
        said, kinds = json.loads(bytes(self.group.receive((length,), mx.uint8).tolist()))
        arrays = []
        for dtype, shape in kinds:
            arrays.append(self.group.receive(shape, getattr(mx, dtype)))
            mx.eval(arrays[-1])
        return said, arrays


class Passing(Ranks):
    """How the residual stream goes from rank to rank."""

    def __init__(self, stage: Stage, group: Group):
        super().__init__(stage.deal)
        self.stage, self.group = stage, group
        self.under_way: tuple[list[mx.array], list[mx.array]] = (
            [],
            [],
        )  # what the first rank sends, and what comes back

    def arriving(self, x):
        if not self.deal.rank:
            return x
        return self._unpacked(self._received(x, self.stage.first))

    def leaving(self, x):
        sent = self.group.send(mx.stack([*x[0], x[1]]) if self.stage.whole.mixed_residual else x)
        if self.deal.rank:
            return self._unpacked(sent)
        back = self._received(x, len(self.stage.whole.layers))
        self.under_way = [sent], [back]
        return self._unpacked(mx.depends(back, sent))  # whoever asks for what comes back means it to be sent

    def _received(self, like, layers: int) -> mx.array:
        """The stream behind so many layers, where ``like`` has the shape and dtype of its sums."""
        if not self.stage.whole.mixed_residual:
            return self.group.receive(like.shape, like.dtype)
        _, total = like
        return self.group.receive((blocks_before(self.stage.whole, layers) + 1, *total.shape), total.dtype)

    def _unpacked(self, x: mx.array):
        if not self.stage.whole.mixed_residual:
            return x
        *blocks, total = x
        return tuple(blocks), total


def blocks_before(spec: ModelSpec, layers: int) -> int:
    """How many blocks of a mixed residual stream are complete after so many layers."""
    return sum(
        residual.starts_block
        for layer in spec.layers[:layers]
        for residual in (layer.mixer_residual, layer.mlp_residual)
    )


def keep_own(model: Model, stage: Stage, dtype: mx.Dtype) -> None:
    """Leave of ``model`` what a rank has; everything else takes no memory and does nothing. ``dtype``: of embedded tokens."""
    for i, layer in enumerate(stage.whole.layers):
        if not stage.first <= i < stage.end:
            model.layers[i] = Elsewhere(layer)
    if stage.deal.rank:
        model.embed = Unread(stage.whole.hidden_size, dtype)
        for name in {"output_mix", "norm", "head"} & model.keys():
            model[name] = Same()


class Elsewhere(nn.Module):
    """A layer that another rank has."""

    def __init__(self, spec: LayerSpec):
        super().__init__()
        self.spec = spec

    @property
    def mixer(self) -> Elsewhere:
        return self

    def make_state(self) -> RecurrentState:
        return RecurrentState(0)

    def __call__(self, x, state, span, dtype=None):
        return x


class Unread(nn.Module):
    """An embedding that the first rank has: the shape of what it gives."""

    def __init__(self, size: int, dtype: mx.Dtype):
        super().__init__()
        self.size, self.dtype = size, dtype

    def __call__(self, ids):
        return mx.zeros((*ids.shape, self.size), self.dtype)


class Same(nn.Module):
    """What the first rank does in the end; elsewhere the sum of a stream goes through as it is."""

    def __call__(self, *stream):
        return stream[-1]
