"""A rank's part of a model, from the model's folder, which every rank has."""

from __future__ import annotations

import atexit
import logging
import sys
from types import ModuleType

from ..errors import ParallelError
from ..layout import unprefixed
from ..model import Model
from ..weights import Checkpoint
from .follower import follow
from .group import Group
from .leader import LeaderModel
from .plan import Share, stored_groups, tensor_plan

log = logging.getLogger(__name__)


def build(checkpoint: Checkpoint, family: ModuleType, group: Group) -> tuple[Model, Share]:
    """This rank's part of the model, still without weights, and what it is a part of."""
    spec = family.spec(checkpoint.config)
    shapes = {unprefixed(name, family.PREFIXES): info.shape for name, info in checkpoint.tensors.items()}
    plan = tensor_plan(spec, group.size, stored_groups(dict(family.names(spec)), shapes if checkpoint.is_mlx else {}))
    if not any(name.startswith("layers.") for name in plan.cuts):
        raise ParallelError(
            f"this model cannot be dealt out to {group.size} ranks ({'; '.join(plan.left_whole())}): use another number of them"
        )
    if plan.whole and group.rank == 0:
        log.warning("every rank has whole: %s", "; ".join(plan.left_whole()))
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
