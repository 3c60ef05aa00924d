"""One bench from its options: the model, the checks, the rows, mode by mode."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from .. import budget
from ..doctor import bandwidth
from ..figures import figures
from ..loading import load_model
from ..model import Model
from ..parallel import Group
from ..state import KVOptions
from . import frontiers, machine, parity, peer, predict
from .modes import CONTEXTS
from .progress import Log
from .random_weights import random_model
from .rows import Report, ordered
from .shapes import shape
from .sides import Ours

NO_LIMIT = 1 << 62
SHAPE_READ_LIMIT = 16 * 1024  # tokens: beyond, a shape's contexts are filled


def bench(
    args: argparse.Namespace,
    modes: dict[str, KVOptions],
    limit: float | None,
    output: Path | None,
    began: float,
    log: Log,
    group: Group | None = None,
) -> tuple[Report, bool]:
    """The report, and whether it was finished; an interrupt ends it with the rows that it has.

    ``group``: the ranks to share the model with. The first one measures, the others do what it says and exit.
    """
    differences: dict[str, float] = {}

    def compare(model: Model) -> None:
        for mode, options in modes.items():
            with log.bar(f"{mode}, comparing fast paths with their references", parity.TOKENS) as progress:
                differences[mode] = parity.check(model, options, progress)

    model, config = _model(args, limit, group, compare)
    report = Report(_settings(args, group), machine.describe())
    if output is not None:
        report.resume(output)
        if report.rows:
            log.line(f"going on: {len(report.rows)} rows are in {output.name}.json")
    theirs = peer.build(model, config) if args.vs else None
    contexts = sorted({*(args.contexts or CONTEXTS), *([args.max_context] if args.max_context else [])})
    finished = True
    try:
        if theirs is not None:
            with log.bar(f"comparing logits with {args.vs}", parity.TOKENS) as progress:
                report.parity[args.vs] = parity.check_peer(model, theirs, args.vs, progress)
        if group is None:
            compare(model)
        report.parity |= differences
        report.copy_bandwidth = bandwidth()
        for i, (mode, options) in enumerate(modes.items()):
            now = time.monotonic()
            share = (began + args.minutes * 60 - now) / (len(modes) - i)
            plan = frontiers.Plan(
                contexts=tuple(c for c in contexts if c <= (args.max_context or NO_LIMIT)),
                tokens=args.tokens,
                read_limit=args.read_limit or (SHAPE_READ_LIMIT if args.shape else NO_LIMIT),
                deadline=now + share,
                memory_limit=limit,
            )
            for row in frontiers.measure(_sides(model, theirs, options, args, limit), mode, plan, report, log):
                report.rows = ordered([*report.rows, row], modes)
                if output is not None:
                    report.save(output)
                log.line(_told(row))
    except KeyboardInterrupt:
        log.line("stopped; what was measured is kept" + (", and the same command goes on from it" if output else ""))
        finished = False
    for mode, options in modes.items() if group is None else ():  # what other ranks would hold is not known here
        run = report.run(Ours.name, mode)
        missing = [context for context in contexts if not any(row.context == context for row in run)]
        rows = predict.predicted(model, options, mode, run, missing, args.prefill_step_size)
        report.rows = ordered([*report.rows, *rows], modes)
    if output is not None:
        report.save(output)
    return report, finished


def _sides(model: Model, theirs, options: KVOptions, args: argparse.Namespace, limit: float | None) -> list:
    """Those that can run in this mode; mlx_lm bounds no hybrid's cache."""
    sides: list = [Ours(model, options, args.prefill_step_size, limit)]
    if theirs is not None and options.max_kv_size is None:
        sides.append(peer.Peer(theirs, options, args.prefill_step_size))
    return sides


def _settings(args: argparse.Namespace, group: Group | None) -> dict:
    """What rows are comparable within, besides the machine."""
    name = (
        args.model
        if args.shape is None
        else f"{args.shape}, random weights, " + ("unquantized" if args.bits == "none" else f"{args.bits} bits")
    )
    names = (
        "revision",
        "dtype",
        "tokens",
        "prefill_step_size",
        "max_kv_size",
        "kv_bits",
        "kv_group_size",
        "read_limit",
    )
    parallel = group and f"{group.kind}, {group.size} ranks"
    return {"model": name, **{key: getattr(args, key) for key in names}, "parallel": parallel}


def _model(
    args: argparse.Namespace, limit: float | None, group: Group | None, on_every_rank: Callable[[Model], None]
) -> tuple[Model, dict]:
    shared = {} if group is None else {"group": group, "on_every_rank": on_every_rank}
    if args.shape is None:
        return load_model(args.model, revision=args.revision, dtype=args.dtype, memory_limit=limit, **shared)
    config = shape(args.shape)
    bits = None if args.bits == "none" else int(args.bits)
    name = "bfloat16" if bits is None else f"{bits}-bit"
    if args.parallel == "pipeline":
        weights = figures(config).weights[name] // group.size
    else:
        weights = figures(config, ranks=1 if group is None else group.size).weights[name]
    budget.require_weights(weights, limit, args.shape)
    dtype = getattr(mx, args.dtype or "bfloat16")
    return random_model(config, bits, dtype, **shared), config


def _told(row) -> str:
    from .table import cells, mark

    rate, pace, *sizes = cells(row)
    return f"{row.library}, {row.mode}, {mark(row).strip()}: {rate} tokens/s, {pace} ms a token, {sizes[2]}"
