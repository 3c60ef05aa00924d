"""One model on several machines (or GPUs), over MLX's own communication: what each rank has, and how they run together.

The first rank runs the program: a chat, a server, a script. Its model and its states look like any others, but whatever
is done to them the other ranks do as well, each with its part of the model. So nothing outside this room knows of ranks.

    cuts, plan        which layers are dealt out, and what each rank has of them
    start, ring       how the ranks find each other, and notice that one is gone
    load, agree       each rank's part of the weights; whether all have the same
    line, leader, follower     what the first rank says, and what the others do
"""

from .agree import digest, together
from .group import Group
from .load import build, end, run
from .plan import Plan, Share, stored_groups, tensor_plan
from .start import KINDS, check, start

__all__ = [
    "KINDS",
    "Group",
    "Plan",
    "Share",
    "build",
    "check",
    "digest",
    "end",
    "run",
    "start",
    "stored_groups",
    "tensor_plan",
    "together",
]
