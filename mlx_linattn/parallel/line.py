"""What the first rank tells the others to do. It runs the program; they hold their part of the model and follow.

A message is a few integers, sent in the way in which the ranks share what layers make (:class:`Arrangement`): so there is no
second connection, and both keep one order on all ranks.

    READ      state, B, T, logits, counts    the tokens [B, T] follow; the state reads them, and their logits may be wanted
    PREDICT   dtype, shape               hidden states follow; their logits are wanted
    CALL      JSON                       a method of a state, its arguments, the number of its result
    DROP      ids                        states and snapshots that the first rank let go of
    SAMPLE    count                      numbers of every weight, which tell this model from another
    END                                  the program is over
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..state import KVOptions
from .arrangement import Arrangement

READ, PREDICT, CALL, DROP, SAMPLE, END = range(6)
FIRST = 64  # integers of a message's first packet: operation, length of the rest, and as much of the rest as there is room for
DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def message(ranks: Arrangement, operation: int, numbers: Sequence[int], tail: mx.array | None = None) -> mx.array:
    """The numbers and then ``tail``'s, as int32 arrays that send themselves as they are evaluated; what all ranks then have."""
    parts = [mx.array([operation, len(numbers) + (0 if tail is None else tail.size), *numbers], mx.int32)]
    if tail is not None:
        parts.append(tail.flatten().astype(mx.int32))
    whole = mx.concatenate(parts)
    if whole.size <= FIRST:
        return ranks.tell(mx.pad(whole, (0, FIRST - whole.size)))[2 : whole.size]
    first = ranks.tell(whole[:FIRST])
    second = ranks.tell(mx.depends(whole[FIRST:], first))
    return mx.concatenate([first[2:], second])


def receive(ranks: Arrangement, first: mx.array) -> tuple[int, list[int]]:
    """The next message, as the other ranks hear it: operation and numbers. ``first``: its first packet, ``ranks.hear(FIRST)``."""
    ranks.group.connections.wait()
    operation, size, *numbers = first.tolist()
    if size > FIRST - 2:
        numbers += ranks.hear(size - (FIRST - 2)).tolist()
    return operation, numbers[:size]


def encoded(argument):
    """An argument of a state's method as JSON can hold it: states and snapshots by their numbers."""
    if isinstance(argument, (list, tuple)):
        return [encoded(one) for one in argument]
    if isinstance(argument, KVOptions):
        return {"options": argument.as_dict()}
    number = getattr(argument, "number", None)
    return argument if number is None else {"number": number}


def decoded(argument, things: dict[int, object]):
    """The reverse of :func:`encoded`, where states and snapshots are ``things``."""
    if isinstance(argument, list):
        return [decoded(one, things) for one in argument]
    if not isinstance(argument, dict):
        return argument
    return KVOptions(**argument["options"]) if "options" in argument else things[argument["number"]]
