"""From ``mlx.launch`` to a group of ranks, or to one line that says who is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

from ..errors import ParallelError
from .connections import Connections, ring_size
from .group import Group

KINDS = ("tensor", "pipeline")
joined: list[Group] = []
PATIENCE = 120.0  # seconds until all ranks must have joined

# Run beside us while MLX waits for the others, since that holds Python's lock: nothing in this process could look at a clock.
WATCH = """
import os, select, signal, sys
if not select.select([0], [], [], float(sys.argv[1]))[0]:
    os.write(2, (sys.argv[3] + "\\n").encode())
    os.kill(int(sys.argv[2]), signal.SIGKILL)
"""


def start(kind: str, patience: float = PATIENCE) -> Group:
    """Join the other ranks. Raises ParallelError where this process was not started as one of several.

    Ends this process, with a line on stderr, where not all ranks have joined after ``patience`` seconds.
    """
    if kind not in KINDS:
        raise ParallelError(f"parallel {kind!r} is not known; choose one of {', '.join(KINDS)}")
    rank, size = int(os.environ.get("MLX_RANK", 0)), ring_size()
    if kind == "pipeline" and not size and "NCCL_HOST_IP" in os.environ:
        raise ParallelError(
            "parallel pipeline: MLX's NCCL passes nothing from rank to rank; add --backend ring to mlx.launch"
        )
    group, connections = None, joined[-1].connections if joined else Connections(rank)
    try:
        if size != 1:  # MLX would try to connect it with itself
            with _watched(rank, size, patience):
                group = mx.distributed.init(strict=True)
    except (RuntimeError, ValueError) as error:
        if size:
            raise ParallelError(
                f"rank {rank} of {size}: rank {(rank + 1) % size} does not answer ({error}): was it started, and can it be reached?"
            ) from error
    if group is None or group.size() == 1:
        raise ParallelError(
            "parallel needs several ranks: start the whole command with mlx.launch, as in "
            "`mlx.launch -n 2 -- mlx-linattn generate --parallel tensor ...`"
        )
    if not joined:  # MLX joins the ranks once
        connections.joined()
    joined.append(Group(group, kind, connections))
    return joined[-1]


def check(error: RuntimeError) -> None:
    """Where ``error`` means that another rank is gone, say so and end this process."""
    if joined and joined[-1].is_break(error):
        joined[-1].give_up()


@contextmanager
def _watched(rank: int, size: int, patience: float) -> Iterator[None]:
    neighbours = (
        " or ".join(f"rank {r}" for r in sorted({(rank - 1) % size, (rank + 1) % size})) if size else "another rank"
    )
    text = f"mlx-linattn: rank {rank} of {size or 'several'}: {neighbours} did not join within {patience:g} seconds: was it started?"
    command = [sys.executable, "-c", WATCH, str(patience), str(os.getpid()), text]
    watch = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        yield
    finally:
        watch.stdin.close()
        watch.wait()
