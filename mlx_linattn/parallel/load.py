"""A rank's part of a model, from the model's folder, which every rank has."""

from __future__ import annotations

import atexit
import sys
from types import ModuleType

from ..layout import locate
from ..model import Model
from ..weights import Checkpoint, Tensors
from .follower import follow
from .group import Group
from .leader import LeaderModel
from .plan import Share, tensor_plan


def build(checkpoint: Checkpoint, family: ModuleType, group: Group) -> tuple[Model, Share]:
    """This rank's part of the model, still without weights, and what it is a part of."""
    spec = family.spec(checkpoint.config)
    tensors, names = Tensors(checkpoint, family, spec), dict(family.names(spec))

    def packed(module: str, inputs: int) -> int:
        scales = f"{locate(module, names).sources[0]}.scales"
        return inputs // tensors.info(scales).shape[-1] if checkpoint.is_mlx and scales in tensors else 1

    plan = tensor_plan(spec, group.size, packed)
    share = plan.share(group.rank)
    model = LeaderModel(share, group) if group.rank == 0 else Model(share.spec)
    plan.connect(model, group)
    return model, share


def run(model: Model, share: Share, group: Group) -> None:
    """On the first rank: from now on the others follow, until this process ends. On the others: follow, and exit then."""
    group.busy = True
    group.join()
    if group.rank == 0:
        atexit.register(end, model, group)
        return
    try:
        follow(model, share.plan, group)
    except RuntimeError as error:
        if group.is_break(error):
            group.give_up()
        raise
    group.leave()
    group.busy = False
    sys.exit(0)


def end(model: LeaderModel, group: Group) -> None:
    """On the first rank: the others need not follow any longer."""
    if group.busy:
        group.busy = False
        model.end()
        group.leave()
