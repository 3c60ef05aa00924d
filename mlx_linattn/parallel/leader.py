"""The first rank's model and states. They look like any others; whatever is done to them, the other ranks do too.

Nothing waits for an answer: a state's methods have the same effect everywhere, and what they return is numbered alike.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import wraps

import mlx.core as mx

from ..errors import StateError
from ..model import Model
from ..state import KVOptions, ModelState, Snapshot
from . import line
from .arrangement import Arrangement, described, kinds_of


class Line:
    """The first rank's end of the line: numbers what exists, and says what to do in the order in which it is done."""

    def __init__(self, ranks: Arrangement):
        self.ranks = ranks
        self.silent = False
        self._numbers = 0
        self._dropped: list[int] = []
        self._flying: list[mx.array] = []  # what was sent last
        self._thread = threading.get_ident()

    @contextmanager
    def silence(self) -> Iterator[None]:
        """What happens inside is nobody else's business."""
        before, self.silent = self.silent, True
        try:
            yield
        finally:
            self.silent = before

    def new_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def bind(self, thing, number: int) -> int:
        """``number`` is that of ``thing``. When nobody holds it any more, the others let go of theirs."""
        weakref.finalize(thing, self._dropped.append, number).atexit = False
        return number

    def message(self, operation: int, numbers: Sequence[int], tail: mx.array | None = None) -> mx.array:
        return line.message(self.ranks, operation, numbers, tail)

    def send(self, message: mx.array, *arrays: mx.array, hidden: mx.array | None = None) -> None:
        """As :meth:`Arrangement.start`: begin to evaluate a message and what belongs to it."""
        if self._thread != threading.get_ident():  # threads have streams of their own, which could overtake each other
            self.settle()
            self._thread = threading.get_ident()
        self._flying = self.ranks.start(message, hidden, list(arrays))

    def settle(self) -> None:
        """Wait for what was sent last."""
        mx.eval(self._flying)

    def call(self, method: str, *arguments, result: int | list[int] | None = None) -> None:
        """Let the others call a method of a state, the first of ``arguments``; ``result`` is the number of what it returns."""
        if self._dropped:
            dropped, self._dropped[:] = list(self._dropped), []
            self.send(self.message(line.DROP, dropped))
        text = json.dumps([method, line.encoded(arguments), result])
        self.send(self.message(line.CALL, list(text.encode())))

    def end(self) -> None:
        mx.eval(self._flying, self.message(line.END, []))


@dataclass(frozen=True)
class NumberedSnapshot(Snapshot):
    number: int = 0


def told(name: str):
    """A method of ModelState that the other ranks' states go through as well."""
    method = getattr(ModelState, name)

    @wraps(method)
    def do(self: LeaderState, *arguments):
        own = self.line
        if own.silent:
            return method(self, *arguments)
        with own.silence():  # what it calls itself is a part of it
            result = method(self, *arguments)
        number = None
        if isinstance(result, (ModelState, Snapshot)):
            number = own.new_number()
            result = self.numbered(result, number)
        own.call(name, self, *arguments, result=number)
        return result

    return do


class LeaderState(ModelState):
    """The first rank's part of a state, which tells the others what becomes of it."""

    can_be_cut = False

    def __init__(self, own: Line, layers: Iterable, options: KVOptions):
        super().__init__(layers, options)
        self.line = own
        self.number = own.bind(self, own.new_number())

    def numbered(self, thing: ModelState | Snapshot, number: int):
        """What a method made of this state, known by ``number`` from now on."""
        if isinstance(thing, Snapshot):
            thing = NumberedSnapshot(
                **{field.name: getattr(thing, field.name) for field in fields(thing)}, number=number
            )
        else:
            thing.number = number
        self.line.bind(thing, number)
        return thing

    adopt, reset, reserve, skip = told("adopt"), told("reset"), told("reserve"), told("skip")
    fork, take, join = told("fork"), told("take"), told("join")
    snapshot, restore = told("snapshot"), told("restore")

    def dump(self, snapshots: Iterable[Snapshot] = ()) -> list:
        snapshots = list(snapshots)
        self.line.call("dump", self, snapshots)
        return self.line.ranks.dumped(self, snapshots)

    def load(self, layers: Iterable, length: int, snapshots: Iterable[tuple[Sequence, int]] = ()) -> list[Snapshot]:
        snapshots = list(snapshots)
        layout, arrays = described([list(layers), *(list(one) for one, _ in snapshots)])
        kinds = kinds_of(arrays)
        lengths = [length, *(position for _, position in snapshots)]
        numbers = [self.line.new_number() for _ in snapshots]
        self.line.call("load", self, layout, kinds, lengths, result=numbers)
        with self.line.silence():
            found = self.line.ranks.loaded(self, layout, kinds, lengths, arrays)
        return [self.numbered(one, number) for one, number in zip(found, numbers)]

    def assemble(self, layers, pieces, length) -> None:
        raise StateError(
            "pieces of a state that several ranks share cannot be put together on one of them: keep no prefixes"
        )


class LeaderModel(Model):
    """The first rank's part of a model. Its logits are the whole model's."""

    def __init__(self, ranks: Arrangement):
        super().__init__(ranks.share.spec)
        self._line = Line(ranks)

    def alone(self):
        """A context in which the other ranks are told of nothing: what is done inside, they do by themselves."""
        return self._line.silence()

    def make_cache(self, options: KVOptions = KVOptions()) -> ModelState:  # noqa: B008 - frozen
        if self._line.silent:
            return super().make_cache(options)
        state = LeaderState(self._line, (layer.mixer.make_state() for layer in self.layers), options)
        self._line.call("make_cache", options, result=state.number)
        return state

    def __call__(self, ids, cache: ModelState | None = None, *, lengths=None, left_padding=None):
        if self._line.silent or left_padding is not None or self.spec.vocab_parts == 1:
            return super().__call__(ids, cache, lengths=lengths, left_padding=left_padding)
        return self._read(ids, cache, lengths, logits=True)  # in one message, not in two

    def hidden_states(self, ids, cache: ModelState | None = None, *, lengths: Sequence[int] | None = None):
        if self._line.silent:
            return super().hidden_states(ids, cache, lengths=lengths)
        return self._read(ids, cache, lengths)

    def _read(self, ids, cache: ModelState | None, lengths: Sequence[int] | None, logits: bool = False):
        ids = mx.array(ids)
        state = self.make_cache() if cache is None else cache
        if ids.shape[1] == 1 and state.must_wait:  # as generation.begin, but here a token begins at once
            self._line.settle()
        counts = list(lengths or ())
        head = [state.number, state.offset, *ids.shape, int(logits), len(counts), *counts]
        sent = self._line.message(line.READ, head, ids)
        hidden = super().hidden_states(sent[len(head) :].reshape(ids.shape), state, lengths=lengths)
        made = [super().logits(hidden)] if logits else []
        # At once, so that messages and sums stay in order whatever the caller evaluates, and when.
        self._line.send(sent, *made, *state.arrays, hidden=hidden)
        return made[0] if logits else hidden

    def rehearse(self, state: ModelState) -> ModelState:
        with self.alone():
            return super().rehearse(state)

    def logits(self, hidden):
        if self.spec.vocab_parts == 1:  # the whole head is here
            return super().logits(hidden)
        sent = self._line.message(line.PREDICT, [line.DTYPES.index(hidden.dtype), *hidden.shape])
        logits = super().logits(self.ranks.sum(mx.depends(hidden, sent)))
        self._line.send(sent, logits)
        return logits

    def sampled(self, count: int):
        self._line.send(self._line.message(line.SAMPLE, [count]))
        return self._line.ranks.sampled(self, count)

    def end(self) -> None:
        """Tell the other ranks that the program is over."""
        self._line.end()
