"""The engine's thread: it loads the model, owns every state, and makes all answers."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten

from .. import budget
from ..errors import BusyError, ClosedError, MemoryLimitError
from ..loading import load
from ..state import KVOptions, ModelState
from .batch import Batch, Row, Step
from .choice import Choice
from .prefix_files import PrefixFolder
from .prefixes import Prefixes
from .prompt import Prompt
from .stream import Channel
from .transcript import Transcript
from .types import Done, Progress, Request, Timing, Usage

PREFILL_STEP = 512  # prompt tokens that are read between two tokens of other answers
STRIDE = 2048  # a checkpoint in every so many tokens of a long prompt


class Rest(NamedTuple):
    """A sequence outside of the batch: its tokens, a state that has read some of them or all, and the token chosen to follow."""

    tokens: list[int]
    state: ModelState | None
    following: tuple[int, mx.array] | None = None


@dataclass(eq=False)
class Job:
    """A request on its way."""

    request: Request
    prompt: Prompt
    max_tokens: int  # -1: no limit
    channel: Channel
    transcript: Transcript
    choice: Choice
    came: float = field(default_factory=time.perf_counter)
    began: float | None = None
    first: float | None = None
    reused: int = 0
    ends: set[int] = field(default_factory=set)  # where to remember the state
    row: Row | None = None  # while it is in the batch
    rest: Rest | None = None  # before that, and while nobody reads it
    over: bool = False


@dataclass
class Totals:
    requests: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    completion_tokens: int = 0


class Worker:
    """Loads in its thread; raises what loading raises. ``source``: a folder or Hub id, or a model and its tokenizer."""

    def __init__(
        self,
        source: Any,
        loading: dict[str, Any],
        options: KVOptions,
        *,
        max_rows: int,
        max_queue: int,
        prefix_bytes: int | None,
        prefix_folder: Path | None,
        memory_limit: float | None,
    ):
        self.totals = Totals()
        self.max_rows, self.max_queue, self.memory_limit = max_rows, max_queue, memory_limit
        self.rows: dict[Row, Job] = {}
        self.waiting: deque[Job] = deque()
        self.resting: list[Job] = []
        self._options, self._prefix_bytes, self._prefix_folder = options, prefix_bytes, prefix_folder
        self._news: SimpleQueue[Job | None] = SimpleQueue()  # its put() may even be called by a finalizer
        self._door = threading.Lock()  # of the two below, and of the order in which jobs and the end come
        self._jobs = 0
        self._full = False  # until an answer ends, there is no memory for another
        self._closed: BaseException | None = None
        self._loaded = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(source, loading), name="mlx_linattn engine", daemon=True
        )
        self._thread.start()
        self._loaded.wait()
        if self._failure is not None:
            self._thread.join()  # MLX aborts a process that ends while one of its threads still does
            raise self._failure

    # From any thread

    def submit(self, job: Job) -> None:
        with self._door:
            self._refuse_closed()
            if self._jobs >= self.max_rows + self.max_queue:
                raise BusyError(
                    f"the engine makes {self.max_rows} answers and {self.max_queue} more wait: try again later, or give it a larger max_queue"
                )
            self._jobs += 1
            self._news.put(job)

    def _refuse_closed(self) -> None:
        if self._closed is not None:
            raise ClosedError(str(self._closed)) from self._closed.__cause__

    @property
    def queue(self) -> int:
        return self._jobs - len(self.rows)

    def stir(self) -> None:
        """Have the thread look around."""
        self._news.put(None)

    def close(self, timeout: float | None = None) -> None:
        with self._door:
            if self._closed is None:
                self._closed = ClosedError("the engine was closed")
        self.stir()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def require_room(self, tokens: int, later: int) -> None:
        """Raises MemoryLimitError where a prompt of ``tokens`` and an answer of ``later`` would not fit even alone."""
        with self._door:
            self._refuse_closed()
            state = self._probe.nbytes_with(tokens + later)
        need = budget.Estimate(self._weights, state, self._temporary)
        budget.require(
            need, self.memory_limit, f"a request of {tokens:,} tokens and {later:,} more",
            "Shorten the prompt, or bound the cache with max_kv_size or kv_bits",
        )  # fmt: skip

    # In the thread

    def _run(self, source: Any, loading: dict[str, Any]) -> None:
        try:
            self._load(source, loading)
            self._loaded.set()
            self._serve()
        except BaseException as error:
            self._failure = error
            self._loaded.set()
        finally:
            self._leave_mlx()

    def _serve(self) -> None:
        try:
            while self._listen():
                self._turn()
            ending = self._closed
            self._write_prefixes(lambda: False)
        except BaseException as error:
            ending = ClosedError(f"the engine's thread has failed: {type(error).__name__}: {error}")
            ending.__cause__ = error
        with self._door:
            self._closed = ending
        self._collect()
        for job in [*self.rows.values(), *self.resting, *self.waiting]:
            self._end(job, ending)
        self.rows, self.waiting, self.resting = {}, deque(), []
        self.prefixes.clear()
        self._batch = self._probe = self.model = self._folder = None

    @staticmethod
    def _leave_mlx() -> None:
        """MLX wants each of its threads to clear up; without it the process may abort when it ends (mlx#4327)."""
        mx.clear_cache()
        if hasattr(mx, "clear_streams"):
            mx.clear_streams()

    def _load(self, source: Any, loading: dict[str, Any]) -> None:
        if isinstance(source, tuple):
            (self.model, self.tokenizer), self.config = source, {}
        else:
            self.model, self.tokenizer, self.config = load(
                source, return_config=True, memory_limit=self.memory_limit, **loading
            )
        self._weights = sum(array.nbytes for _, array in tree_flatten(self.model.parameters()))
        self._probe = self.model.make_cache(self._options)
        mx.eval(self.model.hidden_states(mx.array([[0]]), self._probe), self._probe.arrays)
        self._temporary = budget.temporary(self.model, PREFILL_STEP)
        room = budget.checkpoint_bytes() if self._prefix_bytes is None else self._prefix_bytes
        self.prefixes = Prefixes(self.model, self._options, room)
        self._folder = None
        if self._prefix_folder is not None:
            self._folder = PrefixFolder(self._prefix_folder, self.prefixes, self.model, self.tokenizer, self._options)
            self._folder.load()
        self._batch = Batch(
            self.model, self._options,
            max_rows=self.max_rows, prefill_step=PREFILL_STEP, memory_limit=self.memory_limit,
        )  # fmt: skip

    def _listen(self) -> bool:
        """Take what came; sleeps while there is nothing to do. False at the end."""
        if not self.rows and not self.waiting:
            self._write_prefixes(lambda: not self._news.empty())
            self._hear(self._news.get())
        self._collect()
        return self._closed is None

    def _write_prefixes(self, interrupted: Callable[[], bool]) -> None:
        """The disk gets what is new when there is nothing else to do."""
        for _ in self._folder.update() if self._folder else ():
            if interrupted():
                return

    def _collect(self) -> None:
        while not self._news.empty():
            self._hear(self._news.get())

    def _hear(self, news: Job | None) -> None:
        if news is not None:
            self.waiting.append(news)

    def _turn(self) -> None:
        for job in [job for job in self.resting if job.channel.awake]:
            self.resting.remove(job)
            self.waiting.appendleft(job)
        for job in [*self.waiting, *self.rows.values()]:
            if job.channel.cancelled:
                self._finish(job, "cancel")
        self._admit()
        for step in self._batch.step() if self.rows else ():
            if step.row in self.rows:  # it may have left in this very turn
                job = self.rows[step.row]
                self._guard(job, self._deliver, job, step)
        for row, job in list(self.rows.items()):
            if job.channel.rest():  # its reader does not keep up
                state = self._leave(job)
                job.rest = Rest(list(row.tokens), state, row.following)
                self.resting.append(job)

    def _admit(self) -> None:
        while self.waiting and len(self.rows) < self.max_rows and not self._full:
            job = self.waiting.popleft()
            try:
                self._begin(job)
            except MemoryLimitError as error:
                if self.prefixes.nbytes:  # what is kept gives way
                    self.prefixes.shrink(self.prefixes.nbytes // 2)
                    self.waiting.appendleft(job)
                elif self.rows:  # answers that are being made do not
                    self._full = True
                    self.waiting.appendleft(job)
                else:
                    self._end(job, error)
            except Exception as error:
                self._end(job, error)

    def _guard(self, job: Job, act: Callable, *arguments: Any) -> None:
        """One job's trouble is not another's."""
        try:
            act(*arguments)
        except Exception as error:
            if job.row is not None:
                self._leave(job)
            self._end(job, error)

    def _begin(self, job: Job) -> None:
        if job.began is None:
            job.began = time.perf_counter()
        if job.rest is None:
            found = self.prefixes.find(job.prompt.tokens)
            job.reused = found.state.offset if found.state else 0
            # Where this prompt parts from an earlier one, a third may part too.
            job.ends = {*job.prompt.ends, found.parting, *range(STRIDE, len(job.prompt.tokens), STRIDE)}
            job.rest = Rest(job.prompt.tokens, found.state)
        if job.rest.following is not None:
            self._follow(job)
        if job.over:
            return
        tokens, state, _ = job.rest
        made = job.transcript.tokens
        row = self._batch.add(
            tokens, state=state, sampler=job.choice.sample, logits_processors=job.choice.processors,
            max_tokens=-1 if job.max_tokens == -1 else job.max_tokens - made,
            stop_tokens=self.tokenizer.eos_token_ids,
            checkpoints=lambda state: self.prefixes.insert(tokens[: state.offset], state),
            ends=[end for end in job.ends if job.reused < end < len(tokens)] if self.prefixes.room else (),
        )  # fmt: skip
        job.row, job.rest = row, None
        self.rows[row] = job

    def _follow(self, job: Job) -> None:
        """Report the token that was chosen before an answer came to rest."""
        tokens, state, (token, logprobs) = job.rest
        job.rest = Rest([*tokens, token], state)
        reason = "stop" if token in self.tokenizer.eos_token_ids else None
        if job.transcript.tokens + 1 == job.max_tokens:
            reason = reason or "length"
        self._deliver(job, Step(None, token, logprobs, reason))

    def _deliver(self, job: Job, step: Step) -> None:
        if step.error is not None:
            raise step.error
        if step.token is None:
            job.channel.put(Progress(step.done, step.total))
            return
        job.first = job.first or time.perf_counter()
        if step.finish_reason == "stop":
            job.transcript.ended()
        else:
            for event in job.transcript.feed(step.token, step.logprobs):
                job.channel.put(event)
        reason = "stop" if job.transcript.stopped else step.finish_reason
        if reason:
            self._finish(job, reason)

    def _leave(self, job: Job) -> Any:
        """Part with a job's row; returns its state, which has read the first ``state.offset`` tokens."""
        row, job.row, self._full = job.row, None, False
        del self.rows[row]
        return self._batch.remove(row) if row.state is None else row.state

    def _finish(self, job: Job, reason: str) -> None:
        """The end of an answer, or of one that was cancelled at whatever stage."""
        if job.row is not None:
            job.rest = Rest(job.row.tokens, self._leave(job))
        elif job in self.waiting:
            self.waiting.remove(job)
        for event in job.transcript.finish():
            job.channel.put(event)
        if reason == "stop" and job.transcript.calls:
            reason = "tool_calls"
        transcript, now = job.transcript, time.perf_counter()
        usage = Usage(len(job.prompt.tokens), job.reused, transcript.tokens, transcript.reasoning_tokens)
        began, first = job.began or now, job.first or now
        job.channel.put(Done(reason, usage, Timing(began - job.came, first - began, now - first)))
        self.totals.requests += 1
        self.totals.prompt_tokens += usage.prompt_tokens
        self.totals.reused_tokens += usage.reused_tokens
        self.totals.completion_tokens += usage.completion_tokens
        self._end(job)
        if job.rest is not None and job.rest.state is not None:
            self.prefixes.insert(job.rest.tokens[: job.rest.state.offset], job.rest.state)
        job.rest = None

    def _end(self, job: Job, error: BaseException | None = None) -> None:
        if not job.over:
            job.over = True
            with self._door:
                self._jobs -= 1
            job.channel.end(error)
