"""The ranks that run one model together, over ``mx.distributed``: ring, JACCL, NCCL or MPI, as ``mlx.launch`` set it up."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence

import mlx.core as mx

from ..cuts import Deal
from ..layers import Ranks
from .connections import Connections

BACKENDS = ("ring", "jaccl", "nccl", "mpi")  # as MLX begins their errors
LOOK, GRACE = 0.5, 1.0  # seconds between looks at the connections, and until a closed one counts as lost


class Group(Ranks):
    """This process among the others. ``kind``: how they share a model.

    When the connection to another rank is lost, this process ends, with a line on stderr and status 2: what was asked of
    MLX by then may never be answered, so there is nothing to go back to.
    """

    def __init__(self, group: mx.distributed.Group, kind: str, connections: Connections):
        super().__init__(Deal(group.rank(), group.size()))
        self.group, self.kind = group, kind
        self._out, self._in = _streams()
        self.busy = False  # with a model
        self.connections = connections
        self._left, self._last_words = threading.Event(), threading.Lock()
        threading.Thread(target=self._watch, name="watch over ranks", daemon=True).start()

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

    def send(self, x):
        """``x``, on its way to the next rank (the last rank's next is the first) as it is evaluated."""
        if not x.size:
            return x
        return mx.distributed.send(x, (self.rank + 1) % self.size, group=self.group, stream=self._out)

    def receive(self, shape: Sequence[int], dtype: mx.Dtype):
        """What the rank before sends."""
        if 0 in shape:
            return mx.zeros(shape, dtype)
        return mx.distributed.recv(shape, dtype, (self.rank - 1) % self.size, group=self.group, stream=self._in)

    def leave(self) -> None:
        """From now on the others may go."""
        self._left.set()

    def join(self) -> None:
        """From now on every rank is needed."""
        self._left.clear()

    def is_break(self, error: RuntimeError) -> bool:
        """Whether ``error`` says that another rank is gone."""
        return any(f"[{name}]" in str(error) for name in BACKENDS)

    def give_up(self) -> None:
        """Say whom this process lost, and end it."""
        self._last_words.acquire()  # and never released: one line, whoever noticed it first
        ranks = " and ".join(self.connections.lost()) or "another rank"
        if self.size == 2:
            ranks = f"rank {1 - self.rank}"
        print(
            f"mlx-linattn: rank {self.rank} of {self.size} lost its connection to {ranks}: it ended, or its machine cannot be "
            "reached; see what it printed last, and start all ranks again",
            file=sys.stderr,
        )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(2)

    def _watch(self) -> None:
        while True:
            threading.Event().wait(LOOK)
            if self._left.is_set() or not self.connections.lost():
                continue
            if not self._left.wait(GRACE):  # nobody said that it was over
                self.give_up()


def _streams() -> tuple:
    """A stream for each direction, so that what is sent waits for nothing that is to come."""
    # From 0.32 on MLX knows a stream only in the thread that made it, or one that it makes anew for each; before, to send takes no such one.
    new = mx.new_stream if mx.__version__.startswith("0.31.") else mx.new_thread_local_stream
    return new(mx.cpu), new(mx.cpu)
