"""A rank's part of a model, from the model's folder, which every rank has."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType

from ..model import Model
from ..weights import Checkpoint
from .agree import together
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


def run(model: Model, ranks: Arrangement, on_every_rank: Callable[[Model], None] | None = None) -> None:
    """For a model that has its weights. On the first rank: from now on the others follow, until this process ends. On the others: follow, and exit then.

    ``on_every_rank`` is done with the model before, by all ranks at the same time.
    """
    group = ranks.group
    group.join()
    ranks.connect(model)
    if on_every_rank is not None:
        with together(group), model.alone() if isinstance(model, LeaderModel) else nullcontext():
            on_every_rank(model)
    group.busy = True
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
