"""``mlx-linattn bench``: how fast a model reads and writes on this machine, and what it holds, as the context grows."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from ..errors import RequestError
from ..generate_cli import add_parallel_option, memory_limit
from ..loading import DTYPES
from .modes import add_mode_options, chosen_modes, parse_contexts, parse_tokens
from .shapes import SHAPES


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="mlx-linattn bench",
        description="Speed and memory of a model at growing contexts, on this machine. First its fast paths are compared with their "
        "references. Rows that time, memory or --max-context leave out are predicted, and marked so.",
    )
    add = made.add_argument
    add_model_argument(made)
    add("--shape", choices=SHAPES, metavar="NAME", help=f"random weights of this shape instead: {', '.join(SHAPES)}")
    add("--bits", choices=("4", "6", "8", "none"), default="4", help="of a shape's weights (default: %(default)s)")
    add_mode_options(made)
    add("--contexts", type=parse_contexts, metavar="LIST", help="such as 1k,16k,64k (default: 1k,4k,16k,64k,256k,1M)")
    add(
        "--max-context",
        type=parse_tokens,
        metavar="N",
        help="the longest to run, such as 128k (default: as time allows)",
    )
    add(
        "--read-limit", type=parse_tokens, metavar="N",
        help="beyond it contexts are not read but filled with zeros, to time tokens only (default: none; of a shape, 16k)",
    )  # fmt: skip
    add(
        "--minutes",
        type=float,
        default=10,
        metavar="M",
        help="begin no row that would end later (default: %(default)s)",
    )
    add(
        "--tokens",
        type=int,
        default=64,
        metavar="N",
        help="tokens to write and time at each context (default: %(default)s)",
    )
    add("--prefill-step-size", type=int, default=2048, metavar="N", help="tokens read at a time (default: %(default)s)")
    add(
        "--vs",
        choices=("mlx_lm",),
        help="run stock mlx_lm on the same weights, by turns (not in mode constant, which it lacks)",
    )
    add(
        "--output",
        "-o",
        metavar="NAME",
        help="write NAME.json, NAME.csv and a chart; started again, go on from NAME.json",
    )
    add_parallel_option(made)
    add("--chart", choices=("svg", "png"), default="svg", help="format of the chart (default: %(default)s)")
    add("--json", action="store_true", help="print JSON instead of a table")
    add_device_options(made)
    return made


def add_model_argument(made: argparse.ArgumentParser) -> None:
    """The model, with or without ``--model`` before it."""
    made.add_argument("model", nargs="?", default=argparse.SUPPRESS, help="folder, Hub id, or demo (default: demo)")
    made.add_argument("--model", default="demo", help=argparse.SUPPRESS)
    made.add_argument("--revision", help="branch, tag or commit on the Hub")
    made.add_argument("--dtype", choices=DTYPES, help="dtype of the weights (default: as stored)")


def add_device_options(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "--memory-limit", type=float, metavar="GB", help="refuse what needs more (default: what the device recommends)"
    )
    made.add_argument("--force", action="store_true", help="refuse nothing for its memory")


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    modes, limit = chosen_modes(args), memory_limit(args)
    for name, least in (("tokens", 4), ("prefill_step_size", 1)):
        if getattr(args, name) < least:
            raise RequestError(f"--{name.replace('_', '-')} is {getattr(args, name)}, expected at least {least}")
    if not args.minutes > 0:
        raise RequestError(f"--minutes is {args.minutes:g}, expected more than 0")
    output = Path(args.output).expanduser() if args.output else None
    if output is not None and not output.parent.is_dir():
        raise RequestError(f"--output: there is no folder {output.parent}")

    if args.parallel and args.vs:
        raise RequestError(f"--vs {args.vs} runs in one process: leave it out, or --parallel")

    from . import table
    from .progress import Log
    from .run import bench

    began, group = time.monotonic(), None
    if args.parallel:
        from ..parallel import start

        group = start(args.parallel)
    log = Log(quiet=group is not None and group.rank > 0)
    report, finished = bench(args, modes, limit, output, began, log, group)
    if args.json:
        print(report.json())
    else:
        table.show(report)
    if output is not None:
        draw(report, output.with_name(f"{output.name}.{args.chart}"), log)
    return 0 if finished else 130


def draw(report, file: Path, log) -> None:
    from . import chart

    plt = chart.pyplot()
    if plt is None:
        log.line(chart.MISSING)
    else:
        chart.draw(plt, report, file)
        log.line(f"chart: {file}")
