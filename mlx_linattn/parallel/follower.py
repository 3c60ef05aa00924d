"""What every rank but the first does: what the first says."""

from __future__ import annotations

import json
from dataclasses import dataclass

import mlx.core as mx

from ..errors import ParallelError
from ..model import Model
from ..state import ModelState
from . import line
from .arrangement import Arrangement

TIDY = 256  # messages after which memory that MLX keeps for reuse is given back


def follow(model: Model, ranks: Arrangement) -> None:
    """Do what the first rank says until its program is over."""
    things: dict = {}  # states and snapshots by number
    before: list[int] | None = None  # what the message before said to read, where that was one token a row
    for count in range(1, 1 << 62):
        first = ranks.hear(line.FIRST)
        ahead = _ahead(model, things, before, first)
        operation, numbers = line.receive(ranks, first)
        before = None
        if operation == line.END:
            return
        if operation == line.READ:
            before = _read(model, ranks, things, numbers, ahead)
        elif operation == line.PREDICT:
            dtype, *shape = numbers
            mx.async_eval(model.logits(ranks.group.sum(mx.zeros(shape, line.DTYPES[dtype]))))
        elif operation == line.CALL:
            _call(model, ranks, things, *json.loads(bytes(numbers)))
        elif operation == line.SAMPLE:
            ranks.sampled(model, *numbers)
        elif operation == line.DROP:
            for number in numbers:
                things.pop(number, None)
        if count % TIDY == 0:
            mx.clear_cache()


@dataclass(frozen=True)
class Step:
    """A token a row: its message without the tokens, what it makes, and the state behind it; nothing of it is evaluated yet."""

    head: list[int]
    made: list[mx.array]
    state: ModelState


def _ahead(model: Model, things: dict, before: list[int] | None, first: mx.array) -> Step | None:
    """What most likely comes next, the next token of the same rows, laid out while its message (``first``) is on its way.

    So when it has come, nobody waits for Python. Where something else comes, nothing has happened.
    """
    if before is None:
        return None
    number, offset, B, T, logits, rows = before
    begin = 2 + len(before)
    if begin + B > line.FIRST:
        return None
    twin = things[number].fork()
    ids = first[begin : begin + B].reshape(B, T)
    return Step([number, offset + 1, B, T, logits, rows], _made(model, ids, twin, logits), twin)


def _made(model: Model, ids: mx.array, state: ModelState, logits: int, lengths=None) -> list[mx.array]:
    hidden = model.hidden_states(ids, state, lengths=lengths)
    return [hidden, model.logits(hidden)] if logits else [hidden]


def _read(model: Model, ranks: Arrangement, things: dict, numbers: list[int], ahead: Step | None) -> list[int] | None:
    number, offset, B, T, logits, rows = head = numbers[:6]
    lengths, ids = numbers[6 : 6 + rows] or None, numbers[6 + rows :]
    state: ModelState = things[number]
    if state.offset != offset:
        raise ParallelError(
            f"rank {ranks.group.rank} of {ranks.group.size}: its state holds {state.offset} tokens, the first rank's {offset}; start again"
        )
    if ahead is not None and ahead.head == head:
        made = ahead.made
        state.become(ahead.state)
    else:
        made = _made(model, mx.array(ids).reshape(B, T), state, logits, lengths)
    if T > 1:  # a piece of a prompt: its temporary memory is not needed again
        mx.eval(made, state.arrays)
        mx.clear_cache()
        return None
    mx.async_eval(made, state.arrays)
    return None if rows else head


def _call(model: Model, ranks: Arrangement, things: dict, method: str, arguments: list, result) -> None:
    arguments = line.decoded(arguments, things)
    if method == "make_cache":
        made = model.make_cache(*arguments)
    elif method == "dump":
        made = ranks.dumped(*arguments)
    elif method == "load":
        state, layout, kinds, lengths = arguments
        made = ranks.loaded(state, layout, kinds, lengths, [None] * len(kinds))
    else:
        state, *others = arguments
        made = getattr(state, method)(*others)
    if isinstance(result, list):
        things.update(zip(result, made))
    elif result is not None:
        things[result] = made
