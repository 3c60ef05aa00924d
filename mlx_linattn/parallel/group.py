"""The ranks that run one model together, over ``mx.distributed``: ring, JACCL, NCCL or MPI, as ``mlx.launch`` set it up."""

from __future__ import annotations

import mlx.core as mx

from ..cuts import Deal
from ..errors import ParallelError
from ..layers import Ranks
from .ring import Neighbours

BACKENDS = ("ring", "jaccl", "nccl", "mpi")  # as MLX begins their errors


class Group(Ranks):
    """This process among the others. ``kind``: how they share a model."""

    def __init__(self, group: mx.distributed.Group, kind: str = "tensor"):
        self.group, self.kind = group, kind
        self.busy = False  # with a model
        self.deal = Deal(group.rank(), group.size())
        self.neighbours = Neighbours(self.rank)
        self.neighbours.keep_alive()

    @property
    def rank(self) -> int:
        return self.deal.rank

    @property
    def size(self) -> int:
        return self.deal.ranks

    def sum(self, x):
        return mx.distributed.all_sum(x, group=self.group)

    def gather(self, x):
        parts = mx.distributed.all_gather(x[None], group=self.group)  # [ranks, ..., n]
        return mx.moveaxis(parts, 0, -2).flatten(-2)

    def broken(self, error: RuntimeError) -> ParallelError | None:
        """What to tell the user where a sum between ranks failed with ``error``; None where that was not the reason."""
        if not any(f"[{name}]" in str(error) for name in BACKENDS):
            return None
        ranks = " and ".join(f"rank {rank}" for rank in self.neighbours.lost()) or "another rank"
        return ParallelError(
            f"rank {self.rank} of {self.size} lost its connection to {ranks} ({error}): it ended, or its machine cannot be "
            "reached; see what it printed last, and start all ranks again"
        )
