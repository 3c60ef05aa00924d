"""The first rank's model and states. They look like any others; whatever is done to them, the other ranks do too.

Nothing waits for an answer: a state's methods have the same effect everywhere, and what they return is numbered alike.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, fields

import mlx.core as mx

from ..model import Model
from ..state import KVOptions, ModelState, Snapshot
from . import line, merge
from .group import Group
from .plan import Plan, Share


class Line:
    """The first rank's end of the line: numbers what exists, and says what to do in the order in which it is done."""

    def __init__(self, group: Group, plan: Plan):
        self.group, self.plan = group, plan
        self._numbers = 0
        self._dropped: list[int] = []
        self._flying: list[mx.array] = []  # what was sent last
        self._thread = threading.get_ident()

    def new_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def bind(self, thing, number: int) -> int:
        """``number`` is that of ``thing``. When nobody holds it any more, the others let go of theirs."""
        weakref.finalize(thing, self._dropped.append, number).atexit = False
        return number

    def number(self, thing) -> int:
        """A number for a new state or snapshot."""
        return self.bind(thing, self.new_number())

    def message(self, operation: int, numbers: Sequence[int], tail: mx.array | None = None) -> mx.array:
        return line.message(self.group, operation, numbers, tail)

    def send(self, *arrays: mx.array) -> None:
        """Start the evaluation of messages and of what belongs to them, in this order."""
        if self._thread != threading.get_ident():  # threads have streams of their own, which could overtake each other
            mx.eval(self._flying)
            self._thread = threading.get_ident()
        self._flying = list(arrays)
        mx.async_eval(*arrays)

    def call(self, state: int, method: str, result: int | list[int] | None = None, **arguments) -> None:
        """Let the others call a method of their state; ``result`` is the number of what it returns, or the numbers."""
        if self._dropped:
            dropped, self._dropped[:] = list(self._dropped), []
            self.send(self.message(line.DROP, dropped))
        text = json.dumps({"state": state, "method": method, "result": result, **arguments})
        self.send(self.message(line.CALL, list(text.encode())))

    def end(self) -> None:
        mx.eval(self.message(line.END, []))


@dataclass(frozen=True)
class NumberedSnapshot(Snapshot):
    number: int = 0


class LeaderState(ModelState):
    """The first rank's part of a state, which tells the others what becomes of it."""

    def __init__(self, own: Line, layers, options: KVOptions):
        super().__init__(layers, options)
        self._line = own
        self.number = own.number(self)

    def adopt(self, options: KVOptions) -> None:
        super().adopt(options)
        self._line.call(self.number, "adopt", options=options.as_dict())

    def reset(self) -> None:
        super().reset()
        self._line.call(self.number, "reset")

    def reserve(self, tokens: int) -> None:
        super().reserve(tokens)
        self._line.call(self.number, "reserve", tokens=tokens)

    def fork(self) -> ModelState:
        twin = super().fork()
        twin.number = self._line.number(twin)
        self._line.call(self.number, "fork", twin.number)
        return twin

    def snapshot(self) -> Snapshot:
        found = self._numbered(super().snapshot(), self._line.new_number())
        self._line.call(self.number, "snapshot", found.number)
        return found

    def _numbered(self, plain: Snapshot, number: int) -> NumberedSnapshot:
        found = NumberedSnapshot(**{field.name: getattr(plain, field.name) for field in fields(plain)}, number=number)
        self._line.bind(found, number)
        return found

    def restore(self, snapshot: Snapshot) -> None:
        super().restore(snapshot)
        self._line.call(self.number, "restore", snapshot=snapshot.number)

    def dump(self, snapshots: Sequence[Snapshot] = ()) -> list:
        self._line.call(self.number, "dump", snapshots=[one.number for one in snapshots])
        return merge.dumped(self, list(snapshots), self._line.plan, self._line.group)

    def load(self, parts: list, length: int, positions: Sequence[int] = ()) -> list[Snapshot]:
        layout, arrays = merge.described(parts)
        kinds = [(str(array.dtype).rpartition(".")[2], array.shape) for array in arrays]
        numbers = [self._line.new_number() for _ in positions]
        told = {"layout": layout, "kinds": kinds, "length": length, "positions": list(positions)}
        self._line.call(self.number, "load", numbers, **told)
        found = merge.loaded(self, arrays=arrays, plan=self._line.plan, group=self._line.group, **told)
        return [self._numbered(one, number) for one, number in zip(found, numbers)]


class LeaderModel(Model):
    """The first rank's part of a model. Its logits are the whole model's."""

    def __init__(self, share: Share, group: Group):
        super().__init__(share.spec)
        self._line = Line(group, share.plan)

    def make_cache(self, options: KVOptions = KVOptions()) -> ModelState:  # noqa: B008 - frozen
        state = LeaderState(self._line, (layer.mixer.make_state() for layer in self.layers), options)
        self._line.call(state.number, "make_cache", state.number, options=options.as_dict())
        return state

    def hidden_states(self, ids, cache: ModelState | None = None, *, lengths: Sequence[int] | None = None):
        ids = mx.array(ids)
        state = self.make_cache() if cache is None else cache
        (B, T), counts = ids.shape, list(lengths or ())
        head = [state.number, state.offset, B, T, len(counts), *counts]
        sent = self._line.message(line.READ, head, ids)
        hidden = super().hidden_states(sent[len(head) :].reshape(B, T), state, lengths=lengths)
        # At once, so that messages and sums stay in order whatever the caller evaluates, and when.
        self._line.send(sent, hidden, *state.arrays)
        return hidden

    def logits(self, hidden):
        sent = self._line.message(line.PREDICT, [line.DTYPES.index(hidden.dtype), *hidden.shape])
        logits = super().logits(self._line.group.sum(mx.depends(hidden, sent)))
        self._line.send(sent, logits)
        return logits

    def sampled(self, count: int):
        self._line.send(self._line.message(line.SAMPLE, [count]))
        return merge.sampled(self, self._line.plan, self._line.group, count)

    def end(self) -> None:
        """Tell the other ranks that the program is over."""
        self._line.end()
