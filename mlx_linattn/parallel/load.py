"""A rank's part of a model, from the model's folder, which every rank has."""

from __future__ import annotations

import atexit
import sys
from types import ModuleType

from ..model import Model
from ..weights import Checkpoint
from .arrangement import Arrangement
from .follower import follow
from .group import Group
from .leader import LeaderModel
from .pipeline import Pipeline
from .tensor import Tensor

ARRANGEMENTS = {"tensor": Tensor, "pipeline": Pipeline}


def build(checkpoint: Checkpoint, family: ModuleType, group: Group) -> tuple[Model, Arrangement]:
    """This rank's part of the model, still without weights, and what it is a part of."""
    ranks = ARRANGEMENTS[group.kind].of(checkpoint, family, group)
    return LeaderModel(ranks) if group.rank == 0 else Model(ranks.share.spec), ranks


def run(model: Model, ranks: Arrangement) -> None:
    """For a model that has its weights. On the first rank: from now on the others follow, until this process ends. On the others: follow, and exit then."""
    group = ranks.group
    group.busy = True
    group.join()
    ranks.connect(model)
    if group.rank == 0:
        atexit.register(end, model, group)
        return
    try:
        follow(model, ranks)
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
