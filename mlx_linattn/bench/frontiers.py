"""Speed and memory at growing contexts. Between two rows only the tokens between them are read, and only they are timed.

At each context a snapshot is taken, some tokens are written and timed, and the state goes back. An interrupted bench keeps its
rows, not its state: started again, it reads up to the last finished row once more without timing it. As contexts grow by a
factor of four, that costs at most a third of the row that comes next, where a saved state would be gigabytes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .. import budget
from ..errors import MemoryLimitError
from . import predict
from .machine import load, traffic
from .memory import Meter, active
from .modes import short
from .parity import sample
from .progress import Log
from .rows import FILLED, MEASURED, Report, Row
from .sides import Ours

ROUNDS = 4  # the tokens of a row are written in so many goes, the programs taking turns


@dataclass(frozen=True)
class Plan:
    """contexts: rising, those to run.  read_limit: those beyond are filled, not read.  tokens: to write at each.

    deadline: when, on time.monotonic's clock, the last row may begin that is expected to end before it.
    """

    contexts: tuple[int, ...]
    tokens: int
    read_limit: int
    deadline: float
    memory_limit: float | None


def measure(sides: list, mode: str, plan: Plan, report: Report, log: Log) -> Iterator[Row]:
    """The rows that ``report`` lacks, one after the other. ``sides[0]`` is ours."""
    base = active(collect=True)
    meters = [Meter(side) for side in sides]
    ours = sides[0]
    reached = done = 0  # tokens that the states stand at, and those of the last finished row
    for context in plan.contexts:
        if all(report.find(side.name, mode, context) for side in sides):
            done = context
            continue
        if not _worth_starting(ours, mode, context, done, plan, report, log):
            return
        if done > reached:
            _advance(meters, reached, done, plan, log, f"{mode}, reading again to {short(done)}")
        found = _advance(meters, done, context, plan, log, f"{mode}, reading to {short(context)}")
        needed = traffic(ours.model, ours.state)
        times = _write(meters, plan, log, f"{mode}, writing at {short(context)}")
        for meter, (read, seconds), row_times in zip(meters, found, times):
            median = statistics.median(row_times)
            yield Row(
                library=meter.side.name, mode=mode, context=context, read=read,
                prefill_tps=read / seconds if read else None, decode_ms=median * 1e3, state_bytes=meter.side.state_bytes,
                kv_bytes=meter.side.kv_bytes, active_bytes=base + meter.held, peak_bytes=meter.peak,
                bandwidth_share=needed / median / report.copy_bandwidth if report.copy_bandwidth else None,
                kind=FILLED if context > plan.read_limit else MEASURED, load=load(),
            )  # fmt: skip
        reached = done = context


def _worth_starting(ours: Ours, mode: str, context: int, begin: int, plan: Plan, report: Report, log: Log) -> bool:
    """Whether memory and time allow the row; if not, the log says what would."""
    try:
        need = budget.estimate(ours.model, ours.state, context + plan.tokens - ours.state.offset, ours.step)
        budget.require(need, plan.memory_limit, f"{mode} at {short(context)}", "Leave larger contexts out")
    except MemoryLimitError as error:
        log.line(f"not run: {error}")
        return False
    seconds = predict.seconds_to_read(report.run(ours.name, mode), begin, min(context, plan.read_limit))
    left = plan.deadline - time.monotonic()
    if (seconds or 0) > left or left < 0:
        wants = f"would take some {seconds / 60:,.1f} minutes" if seconds else "is not begun"
        log.line(f"not run: {mode} at {short(context)} {wants}, {max(left, 0) / 60:,.1f} are left (--minutes)")
        return False
    return True


def _advance(meters: list[Meter], begin: int, end: int, plan: Plan, log: Log, what: str) -> list[tuple[int, float]]:
    """Bring all programs from ``begin`` to ``end`` tokens: how many of those each has read, and in how many seconds."""
    room = plan.tokens + 2 * ROUNDS
    last = min(end, plan.read_limit)  # what lies behind is filled
    ids = sample(meters[0].side.model.spec.vocab_size, max(last - begin, 0), seed=end)
    results = []
    for meter in meters:
        side, others = meter.side, _others(meters, meter)
        meter.peak, seconds = 0, 0.0
        if ids:
            with log.bar(f"{what} ({side.name})", len(ids)) as progress:
                seconds = meter.do(lambda s=side, p=progress: _timed(lambda: s.read(ids, room, p)), others)
        if end > last:
            meter.do(lambda s=side: s.skip(end - max(begin, last), room), others)
        results.append((len(ids), seconds))
    return results


def _timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _write(meters: list[Meter], plan: Plan, log: Log, what: str) -> list[list[float]]:
    """Seconds of each token, a list for each program; they take turns, so that whatever else the machine does meets both."""
    times: list[list[float]] = [[] for _ in meters]
    each = -(-plan.tokens // ROUNDS)
    with log.bar(what, ROUNDS) as progress:
        for turn in range(ROUNDS):
            for i in range(len(meters)) if turn % 2 == 0 else reversed(range(len(meters))):
                meter = meters[i]
                times[i] += meter.do(lambda s=meter.side: _there_and_back(s, each), _others(meters, meter))
            progress(turn + 1)
    return times


def _there_and_back(side, tokens: int) -> list[float]:
    mark = side.mark()
    times = side.write(1, tokens)
    side.back_to(mark)
    return times


def _others(meters: list[Meter], meter: Meter) -> int:
    return sum(one.held for one in meters if one is not meter)
