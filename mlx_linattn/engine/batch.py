"""Sequences that are answered together: one state for all, and one model call for the next token of each.

No row is padded: prompts are read one by one, in pieces, each into a state of its own, whose row then joins those of the others
(``ModelState.join``). All arrays are copied where a row joins or leaves, and none from token to token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from .. import budget
from ..errors import MemoryLimitError, RequestError
from ..generation import begin, prefill
from ..model import Model
from ..state import KVOptions, ModelState

HOUSEKEEPING = 256  # steps between looks at the memory


class Row:
    """One sequence of a :class:`Batch`; made by its ``add``.

    tokens: the prompt and the answer so far.  prompt_tokens: how many of them were given.
    reused_tokens: how many of those the state held already.
    state: None while the batch keeps the row; afterwards the row's own state, evaluated, which has read
        ``tokens[:state.offset]``. Snapshots that ``checkpoints`` took of this row serve it (``state.restore``).
    following: the token, and its logprobs [V], that was chosen next when the row left early. To go on later, report it and add
        ``[*tokens, token]`` with ``state``.
    """

    def __init__(self, tokens, state, sampler, processors, max_tokens, stop_tokens, checkpoints, ends):
        self.tokens: list[int] = list(tokens)
        self.prompt_tokens = len(self.tokens)
        self.reused_tokens: int = state.offset
        self.state: ModelState | None = None
        self.following: tuple[int, mx.array] | None = None
        self._reading = state  # until the row joins the others
        self._sampler, self._processors = sampler, tuple(processors)
        self._max_tokens, self._stop_tokens = max_tokens, stop_tokens
        self._checkpoints, self._ends = checkpoints, set(ends)
        self._history = mx.array(self.tokens) if self._processors else None

    @property
    def _end(self) -> int:
        """How many tokens this will be at most, as far as is known."""
        return self.prompt_tokens + max(self._max_tokens, 0)

    def _read(self, model: Model, room: int) -> mx.array | None:
        """Read at most ``room`` tokens of the prompt; the logits [1, V] after its last one, or None before that."""
        state, logits = self._reading, None
        while room and state.offset < self.prompt_tokens:
            begin = state.offset
            stop = min(begin + room, self.prompt_tokens, *(end for end in self._ends if end > begin))
            logits = prefill(model, self.tokens[begin:stop], state, room)
            room -= stop - begin
            if stop in self._ends and self._checkpoints:
                self._checkpoints(state)
        mx.clear_cache()
        return logits if state.offset == self.prompt_tokens else None

    def _finish_reason(self) -> str | None:
        if self.tokens[-1] in self._stop_tokens:
            return "stop"
        return "length" if len(self.tokens) - self.prompt_tokens == self._max_tokens else None


@dataclass(frozen=True)
class Step:
    """What happened to one row.

    token: chosen now, and the last of ``row.tokens``; None where, instead, ``done`` of the ``total`` prompt tokens that
        had to be read have been.
    logprobs: [V].  finish_reason: "stop" or "length" where the row has left with this token.
    error: where the row has left because its sampler, a processor or ``checkpoints`` raised this, or, where it has no
        ``max_tokens``, because memory ended; then there is no token.
    """

    row: Row
    token: int | None = None
    logprobs: mx.array | None = None
    finish_reason: str | None = None
    done: int = 0
    total: int = 0
    error: Exception | None = None


class Batch:
    """Sequences that get a token each with every :meth:`step`, while prompts of others are read in between. For one thread.

    A row's numbers are those that it would have alone, but for rounding: matrix products of more rows add up in another order.

    Args:
        options: how attention layers keep their context.
        max_rows: how many sequences have a state at a time; others wait for their turn.
        prefill_step: how many tokens of a prompt are read between two tokens of the other rows.
        memory_limit: bytes; None is the device's working set, ``float("inf")`` never refuses.
    """

    def __init__(
        self,
        model: Model,
        options: KVOptions = KVOptions(),  # noqa: B008 - frozen
        *,
        max_rows: int = 8,
        prefill_step: int = 512,
        memory_limit: float | None = None,
    ):
        if max_rows < 1 or prefill_step < 1:
            raise RequestError(
                f"max_rows is {max_rows} and prefill_step is {prefill_step}, expected at least 1 for both"
            )
        self.model, self.options = model, options
        self.max_rows, self.prefill_step, self.memory_limit = max_rows, prefill_step, memory_limit
        self.state = model.make_cache(options)  # of the rows that decode, in their order
        self._decoding: list[Row] = []
        self._next: tuple[mx.array, list[mx.array]] = (
            mx.zeros((0,), mx.uint32),
            [],
        )  # tokens to report and read, logprobs
        self._reading: deque[Row] = deque()  # rows whose prompts are being read, in turn
        self._queue: deque[Row] = deque()
        self._steps = 0

    @property
    def rows(self) -> list[Row]:
        """Those that get a token with every step."""
        return list(self._decoding)

    @property
    def waiting(self) -> list[Row]:
        """Those whose prompts are being read, the next one first, and then those that are still in the queue."""
        return [*self._reading, *self._queue]

    @property
    def idle(self) -> bool:
        """Whether no row is left."""
        return not (self._decoding or self._reading or self._queue)

    def add(
        self,
        tokens: Sequence[int],
        *,
        state: ModelState | None = None,
        sampler: Callable[[mx.array], mx.array] | None = None,
        logits_processors: Sequence[Callable[[mx.array, mx.array], mx.array]] = (),
        max_tokens: int = -1,
        stop_tokens: Iterable[int] = frozenset(),
        checkpoints: Callable[[ModelState], None] | None = None,
        ends: Iterable[int] = (),
    ) -> Row:
        """Let a prompt of ``tokens`` be read and answered; nothing is computed yet.

        Args:
            state: one row that has read a proper prefix of ``tokens``; it is the batch's from now on (``fork()`` it to keep yours).
            sampler: logprobs [1, V] -> token [1]; the likeliest by default.
            logits_processors: each (all tokens so far, logits [1, V]) -> logits.
            max_tokens: -1 is no limit.  stop_tokens: the answer ends with one of them.
            checkpoints: called with the row's state each time when that holds as many tokens as one of ``ends`` says.
                Its ``snapshot()`` has a constant size and serves ``row.state`` after the row has left.

        Raises:
            RequestError: arguments that make no sense.  StateError: a state of another model, or with other options.
            MemoryLimitError: all rows together would not fit; nothing has changed.
        """
        if not len(tokens):
            raise RequestError("the prompt is empty: give at least one token")
        if max_tokens == 0 or max_tokens < -1:
            raise RequestError(f"max_tokens is {max_tokens}: give a positive number, or -1 for no limit")
        fresh = self.model.make_cache(self.options)
        state = fresh if state is None else state
        fresh.check_fits(state)
        if len(state.counts) > 1 or state.offset >= len(tokens):
            raise RequestError(
                f"the state holds {len(state.counts)} rows of {state.offset} tokens, "
                f"expected one row and fewer tokens than the prompt's {len(tokens)}"
            )
        row = Row(tokens, state, sampler, logits_processors, max_tokens, frozenset(stop_tokens), checkpoints, ends)
        self._require([*self._decoding, *self.waiting, row])
        self._queue.append(row)
        return row

    def _require(self, rows: list[Row], more: int = 0) -> None:
        """Raises MemoryLimitError where ``rows`` will not fit, or not with ``more`` tokens than they have."""
        held = self.state.nbytes + sum(row._reading.nbytes for row in rows if row._reading and not row.reused_tokens)
        longest = max(max(row._end, len(row.tokens) + more) for row in rows)
        count = min(len(rows), self.max_rows)
        fresh = self.model.make_cache(self.options)
        need = budget.estimate_rows(self.model, fresh, count, longest, held, self.prefill_step)
        advice = "Ask for fewer tokens or fewer answers at a time, or bound the cache with max_kv_size or kv_bits"
        budget.require(need, self.memory_limit, f"answering {count} requests of up to {longest:,} tokens", advice)

    def step(self) -> list[Step]:
        """Read one piece of one waiting prompt, if there is any, and then give each row that is ready its next token.

        When a token is reported, the row's state has read it already, and the step after it is under way.
        An exception out of here (none is expected; see ``Step.error``) leaves the rows' states unknown: make another batch.
        """
        while self._queue and len(self._decoding) + len(self._reading) < self.max_rows:
            row = self._queue.popleft()
            row._reading.reserve(row.prompt_tokens)
            self._reading.append(row)
        return [*self._read(), *self._decode()]

    def _read(self) -> list[Step]:
        if not self._reading:
            return []
        row = self._reading[0]
        try:
            logits = row._read(self.model, self.prefill_step)
            token, logprobs, errors = (None, [], {}) if logits is None else _choose([row], logits)
            if errors:
                raise errors[0]
        except Exception as error:
            self._reading.popleft()
            row.state, row._reading = _settled(row._reading), None
            return [Step(row, error=error)]
        step = Step(row, done=row._reading.offset - row.reused_tokens, total=row.prompt_tokens - row.reused_tokens)
        self._reading.rotate(-1)
        if token is not None:
            self._reading.pop()
            self.state, row._reading = self.state.join(row._reading), None
            _move([self.state])
            self._decoding.append(row)
            self._next = mx.concatenate([self._next[0], token]), [*self._next[1], *logprobs]
        return [step]

    def _decode(self) -> list[Step]:
        self._steps += 1
        steps = self._housekeeping() if self._steps % HOUSEKEEPING == 0 else []
        if not self._decoding:
            return steps
        tokens, logprobs = self._next
        # The next step is queued before these tokens are looked at, so that the device never waits for Python.
        logits = self.model(tokens[:, None], self.state)[:, -1]
        for i, row in enumerate(self._decoding):
            if row._history is not None:
                row._history = mx.concatenate([row._history, tokens[i : i + 1]])
        following, scores, errors = _choose(self._decoding, logits)
        begin([following, scores], self.state, tokens)
        self._next = following, scores
        for row, token, said in zip(self._decoding, tokens.tolist(), logprobs):
            row.tokens.append(token)
            steps.append(Step(row, token, said, row._finish_reason()))
        finished = {step.row for step in steps if step.finish_reason}
        errors = {self._decoding[i]: error for i, error in errors.items() if self._decoding[i] not in finished}
        steps += [Step(row, error=error) for row, error in errors.items()]
        self._leave(finished | errors.keys())
        for row in errors:
            row.following = None  # it was not its own choice
        return steps

    def _housekeeping(self) -> list[Step]:
        """Rows without ``max_tokens`` were let in without knowing what they will need: the longest goes when memory ends."""
        mx.clear_cache()
        endless = [row for row in self._decoding if row._max_tokens < 0]
        try:
            if endless:
                self._require([*self._decoding, *self.waiting], HOUSEKEEPING)
        except MemoryLimitError as error:
            row = max(endless, key=lambda row: len(row.tokens))
            self._leave({row})
            return [Step(row, error=error)]
        return []

    def remove(self, row: Row) -> ModelState:
        """Let ``row`` leave at once; returns its state, which has read ``row.tokens[:state.offset]``."""
        if row in self._decoding:
            self._leave({row})
        elif row._reading is not None and row in self.waiting:
            (self._reading if row in self._reading else self._queue).remove(row)
            row.state, row._reading = row._reading, None
        else:
            raise RequestError("this row is not in the batch: it has left already, or is another batch's")
        return row.state

    def _leave(self, gone: set[Row]) -> None:
        if not gone:
            return
        stay = [i for i, row in enumerate(self._decoding) if row not in gone]
        for i, row in enumerate(self._decoding):
            if row in gone:
                row.state = self.state.take([i])
        tokens, logprobs = self._next
        for row, token, scores in zip(self._decoding, tokens.tolist(), logprobs):
            row.following = (token, scores) if row in gone else None
        self._next = mx.take(tokens, mx.array(stay, mx.uint32)), [logprobs[i] for i in stay]
        self.state, self._decoding = self.state.take(stay), [self._decoding[i] for i in stay]
        _move([self.state, *(row.state for row in gone)])


def _choose(rows: Sequence[Row], logits: mx.array) -> tuple[mx.array, list[mx.array], dict[int, Exception]]:
    """The next tokens [B] of ``rows`` from their ``logits`` [B, V], the logprobs [V] of each, and who failed to choose."""
    shared = _normalized(logits)
    likeliest = mx.argmax(shared, axis=-1)
    tokens, logprobs, errors = [], [], {}
    for i, row in enumerate(rows):
        token, scores = likeliest[i : i + 1], shared[i : i + 1]
        try:
            if row._processors:
                scores = logits[i : i + 1]
                for process in row._processors:
                    scores = process(row._history, scores)
                scores = _normalized(scores)
                token = mx.argmax(scores, axis=-1)
            if row._sampler:
                token = row._sampler(scores)
        except Exception as error:
            errors[i] = error
        tokens.append(token)
        logprobs.append(scores[0])
    plain = not any(row._processors or row._sampler for row in rows)
    return likeliest if plain else mx.concatenate([t.astype(mx.uint32) for t in tokens]), logprobs, errors


def _normalized(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _move(states: Iterable[ModelState]) -> None:
    """Make the arrays that rows move to, one layer after the other, so that no more than one layer exists twice."""
    for layers in zip(*states):
        mx.eval([layer.state for layer in layers])


def _settled(state: ModelState) -> ModelState:
    """A state after a failure: what it holds is evaluated, or, where it cannot be, forgotten."""
    try:
        mx.eval(state.arrays)
    except Exception:
        state.reset()
    return state
