"""The tokens that a state has read, and the moments it can go back to.

A checkpoint is as large as the recurrent state, whatever the context. They are kept under a byte budget, and where it is
full the one goes whose loss costs least. Without checkpoint i, a prompt that first differs between it and the next one has
to read pos_i - pos_(i-1) tokens more. How likely that is: changes are the rarer the further back they lie, so about
(pos_(i+1) - pos_i) / (end - pos_i), and more where a message ends, since retry, undo and edit go exactly there. The product
of the two is what a checkpoint is worth. So checkpoints lie dense near the end, sparse far behind it, and at messages. The
first one, which is the end of the system prompt, stays as long as any other can go: a new conversation starts there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from .. import budget
from ..generation import prefill
from ..model import Model
from ..state import ModelState, Snapshot

BOUNDARY = 64  # the end of a message is worth as much as this many tokens
PARTS = 8  # a message is read in so many pieces, with a checkpoint after each,
SHORTEST = 32  # none shorter than this
LONGEST = 2048  # and none longer
TAIL = 16  # and one checkpoint so near the end of a message: dates and such stand there
ANSWER_STRIDE = 8  # tokens between checkpoints in an answer


@dataclass(frozen=True)
class Checkpoint:
    snapshot: Snapshot
    boundary: bool  # at the end of a message

    @property
    def position(self) -> int:
        return self.snapshot.counts[0]


class Timeline:
    """One state, its tokens and its checkpoints. Between calls ``tokens`` are exactly what the state has read."""

    def __init__(self, state: ModelState, room: int):
        self.state, self.room = state, room
        self.tokens: list[int] = []
        self.checkpoints: list[Checkpoint] = []  # by position
        self._trail: list[Checkpoint] = []  # the last two tokens of an answer

    @property
    def checkpoint_nbytes(self) -> int:
        return sum(one.snapshot.nbytes for one in self.checkpoints)

    def fork(self) -> Timeline:
        twin = Timeline(self.state.fork(), self.room)
        twin.tokens, twin.checkpoints = list(self.tokens), list(self.checkpoints)
        return twin

    def reset(self) -> None:
        self.state.reset()
        self.tokens, self.checkpoints, self._trail = [], [], []

    def follow(self) -> None:
        """After a token of an answer: remember it on a stride, and for the moment in any case."""
        self._trail = [*self._trail[-1:], Checkpoint(self.state.snapshot(), False)]
        if self.state.offset % ANSWER_STRIDE == 0:
            self.mark(boundary=False)

    def mark_end(self) -> None:
        """Remember the end of an answer, and the moment before its last token: to go on, that one has to be read again."""
        for one in self._trail:
            last = self.checkpoints[-1].position if self.checkpoints else 0
            if last < one.position < self.state.offset and self.state.reaches(one.snapshot):
                self.checkpoints.append(one)
        self._trail = []
        self.mark()

    def mark(self, boundary: bool = True) -> None:
        """Remember this moment, if the budget has room for any."""
        position = self.state.offset
        if self.checkpoints and self.checkpoints[-1].position == position:
            self.checkpoints[-1] = Checkpoint(self.checkpoints[-1].snapshot, boundary or self.checkpoints[-1].boundary)
        elif position:
            self.checkpoints.append(Checkpoint(self.state.snapshot(), boundary))
        self._evict()

    def _evict(self) -> None:
        held = self.checkpoint_nbytes
        while held > self.room and self.checkpoints:
            gone = self.checkpoints.pop(self._least())
            held -= gone.snapshot.nbytes

    def _least(self) -> int:
        """Index of the checkpoint that is worth least (the module says why)."""
        at = [0, *(one.position for one in self.checkpoints), self.state.offset]
        end = self.state.offset

        def worth(i: int) -> float:
            likely = at[i + 2] - at[i + 1] + (BOUNDARY if self.checkpoints[i].boundary else 0)
            return (at[i + 1] - at[i]) * likely / (end - at[i + 1] + 1)

        first = next((i for i, one in enumerate(self.checkpoints) if one.boundary), 0)
        free = [i for i in range(len(self.checkpoints)) if i != first]
        return min(free, key=worth) if len(free) > 1 else 0

    def nearest(self, limit: int) -> Checkpoint | None:
        """The last checkpoint that holds at most ``limit`` tokens and can still be reached."""
        for one in reversed(self.checkpoints):
            if one.position <= limit and self.state.reaches(one.snapshot):
                return one
        return None

    def rewind(self, prompt: Sequence[int]) -> int:
        """Go back until the state holds a proper prefix of ``prompt``, as long as possible; returns its length."""
        self._trail = []
        # One token at least has to be read, for its logits.
        self.back_to(min(shared_prefix(self.tokens, prompt), len(prompt) - 1))
        return len(self.tokens)

    def back_to(self, limit: int) -> None:
        """Go back to at most ``limit`` tokens."""
        if self.state.offset <= limit:
            return
        self._trail = []
        checkpoint = self.nearest(limit)
        if checkpoint is None:
            self.reset()
            return
        self.state.restore(checkpoint.snapshot)
        del self.tokens[checkpoint.position :]
        self.checkpoints = [one for one in self.checkpoints if one.position <= checkpoint.position]

    def read(
        self, model: Model, prompt: Sequence[int], ends: Iterable[int], step: int, progress: Callable[[int, int], None]
    ) -> None:
        """Read ``prompt`` on from what the state holds, up to the last of ``ends`` (positions where messages end)."""
        ends = sorted(set(ends))
        room = self.room // max(1, budget.fixed_nbytes(model, self.state))
        for stop in stops(ends, room):
            if self.state.offset < stop:
                prefill(model, prompt[self.state.offset : stop], self.state, step, progress)
                self.tokens = list(prompt[:stop])
                self.mark(stop in ends)

    def settle(self, fed: Sequence[int]) -> None:
        """However a turn ended: keep the state's tokens, evaluated, or go back to a moment that is whole.

        ``fed`` is what the model was given, in order; the state should hold its first tokens.
        """
        try:
            # Threads have streams of their own in MLX: only evaluated arrays can go on in another one.
            mx.eval(self.state.arrays)
        except Exception:  # what failed to evaluate never will
            self.reset()
            return
        self.tokens = list(fed[: self.state.offset])
        self.back_to(len(fed))  # where a turn broke off between a token's choice and its arrival


def stops(ends: Sequence[int], room: int) -> list[int]:
    """Where to stop and remember the moment while reading up to the last of ``ends``, if there is room for ``room`` checkpoints."""
    found = set(ends)
    for begin, end in zip([0, *ends], ends):
        parts = min(PARTS, (end - begin) // SHORTEST, room // 4)
        parts = max(parts, -(-(end - begin) // LONGEST), 1)
        found |= {begin + (end - begin) * i // parts for i in range(1, parts)}
        if end - begin >= 4 * TAIL and room > PARTS:
            found.add(end - TAIL)
    return sorted(found)


def shared_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two lists begin with in common."""
    for i, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return i
    return min(len(a), len(b))
