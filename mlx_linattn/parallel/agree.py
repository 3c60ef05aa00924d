"""Before the first token: whether all ranks came as far, with the same program and the same weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

from .. import __version__
from ..errors import LinAttnError, ParallelError, RequestError
from ..weights import Checkpoint
from .group import Group

LONGEST = 4096  # bytes of what a rank tells the others
PLACES, PIECE = 64, 256  # of a weight file, evenly spread, and bytes at each


def exchange(group: Group, text: str) -> list[str]:
    """What every rank says, in their order."""
    data = text.encode()[:LONGEST]
    mine = mx.array(list(data) + [0] * (LONGEST - len(data)), mx.int32)
    said = group.gather(mine).reshape(group.size, LONGEST).tolist()
    return [bytes(numbers).rstrip(b"\0").decode(errors="ignore") for numbers in said]


@contextmanager
def together(group: Group, **facts: str) -> Iterator[dict[str, str]]:
    """What happens inside happens on all ranks or fails on all: then the first rank says why, and the others end.

    ``facts`` (what -> value), to which more may be added inside, must be the same everywhere, and so must the versions.
    """
    if group.busy:
        raise RequestError("the ranks share one model at a time: leave, and start all of them again with --model")
    facts |= {"--parallel": group.kind, "version of mlx_linattn": __version__, "version of mlx": mx.__version__}
    group.join()
    problem = None
    try:
        yield facts
    except LinAttnError as error:
        problem = str(error)
    said = [json.loads(text) for text in exchange(group, json.dumps({"problem": problem, **facts}))]
    failed = [f"rank {rank} of {group.size}: {one['problem']}" for rank, one in enumerate(said) if one["problem"]]
    for rank, one in enumerate(said):
        for what, value in one.items():
            if what != "problem" and value != said[0].get(what):
                failed.append(
                    f"rank {rank} of {group.size} differs from rank 0 in its {what}: {value}, not {said[0].get(what)}; give all ranks the same"
                )
    if failed:
        group.leave()
        raise ParallelError(failed[0]) if group.rank == 0 else SystemExit(2)


def digest(checkpoint: Checkpoint) -> str:
    """Tells one model's files from another's: their headers, and a sample of their numbers."""
    found = hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True).encode())
    for name, info in sorted(checkpoint.tensors.items()):
        found.update(f"{name} {info.dtype} {info.shape};".encode())
    for file in sorted({info.file for info in checkpoint.tensors.values()}):
        size = file.stat().st_size
        with file.open("rb") as stream:
            for place in range(PLACES):
                stream.seek(size * place // PLACES)
                found.update(stream.read(PIECE))
    return found.hexdigest()[:16]
