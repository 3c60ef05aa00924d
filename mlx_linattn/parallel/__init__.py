"""One model on several machines (or GPUs), over MLX's own communication: what each rank has, and how they run together.

The first rank runs the program: a chat, a server, a script. Its model and its states look like any others, but whatever
is done to them the other ranks do as well, each with its part of the model. So nothing outside this room knows of ranks.

    cuts, plan, tensor     each rank has a share of every layer: which, and how they make one layer
    stages, pipeline       each rank has a run of layers: which, and how they make one model
    arrangement            what both have in common
    start, connections     how the ranks find each other, and notice that one is gone
    load, agree            each rank's part of the weights; whether all have the same
    line, leader, follower     what the first rank says, and what the others do
"""

from .agree import digest, together
from .group import Group
from .load import build, end, run
from .pipeline import Elsewhere
from .plan import Plan, Share, stored_groups, tensor_plan
from .stages import Stage, part_sizes, stage_sizes, stages
from .start import KINDS, check, start

__all__ = [
    "KINDS",
    "Elsewhere",
    "Group",
    "Plan",
    "Share",
    "Stage",
    "build",
    "check",
    "digest",
    "end",
    "part_sizes",
    "run",
    "stage_sizes",
    "stages",
    "start",
    "stored_groups",
    "tensor_plan",
    "together",
]
