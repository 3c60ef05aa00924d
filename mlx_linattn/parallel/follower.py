"""What every rank but the first does: what the first says."""

from __future__ import annotations

import json

import mlx.core as mx

from ..errors import ParallelError
from ..model import Model
from ..state import ModelState
from . import line, merge
from .group import Group
from .plan import Plan

TIDY = 256  # messages after which memory that MLX keeps for reuse is given back


def follow(model: Model, plan: Plan, group: Group) -> None:
    """Do what the first rank says until its program is over."""
    things: dict = {}  # states and snapshots by number
    for count in range(1, 1 << 62):
        operation, numbers = line.receive(group)
        if operation == line.END:
            return
        if operation == line.READ:
            _read(model, group, things, numbers)
        elif operation == line.PREDICT:
            dtype, *shape = numbers
            mx.async_eval(model.logits(group.sum(mx.zeros(shape, line.DTYPES[dtype]))))
        elif operation == line.CALL:
            _call(model, plan, group, things, *json.loads(bytes(numbers)))
        elif operation == line.SAMPLE:
            merge.sampled(model, plan, group, *numbers)
        elif operation == line.DROP:
            for number in numbers:
                things.pop(number, None)
        if count % TIDY == 0:
            mx.clear_cache()


def _read(model: Model, group: Group, things: dict, numbers: list[int]) -> None:
    number, offset, B, T, rows = numbers[:5]
    lengths, ids = numbers[5 : 5 + rows] or None, numbers[5 + rows :]
    state: ModelState = things[number]
    if state.offset != offset:
        raise ParallelError(
            f"rank {group.rank} of {group.size}: its state holds {state.offset} tokens, the first rank's {offset}; start again"
        )
    hidden = model.hidden_states(mx.array(ids).reshape(B, T), state, lengths=lengths)
    if T == 1:
        mx.async_eval(hidden, state.arrays)
    else:  # a piece of a prompt: its temporary memory is not needed again
        mx.eval(hidden, state.arrays)
        mx.clear_cache()


def _call(model: Model, plan: Plan, group: Group, things: dict, method: str, arguments: list, result) -> None:
    arguments = line.decoded(arguments, things)
    if method == "make_cache":
        made = model.make_cache(*arguments)
    elif method == "dump":
        made = merge.dumped(*arguments, plan, group)
    elif method == "load":
        state, layout, kinds, lengths = arguments
        made = merge.loaded(state, layout, kinds, lengths, [None] * len(kinds), plan, group)
    else:
        state, *others = arguments
        made = getattr(state, method)(*others)
    if isinstance(result, list):
        things.update(zip(result, made))
    elif result is not None:
        things[result] = made
