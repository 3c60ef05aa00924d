"""``mlx-linattn recall``: what a chat model remembers by distance, with all keys and values, with fewer bits, and with a window only."""

from __future__ import annotations

import argparse
import csv
import io
import json
from pathlib import Path

from ..errors import RequestError
from ..generate_cli import memory_limit, template_options
from .cli import add_device_options, add_model_argument
from .dialogues import KINDS, dialogue, prose, sentences_of
from .modes import add_mode_options, chosen_modes, parse_contexts


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="mlx-linattn recall",
        description="Tells a model something, lets it read other things, and asks. An answer counts where the exact value is in it; "
        "decoding is greedy. The same dialogues in every mode: the difference is the price of bounded memory.",
    )
    add = made.add_argument
    add_model_argument(made)
    about = "; ".join(f"{name}: {what}" for name, what in KINDS.items())
    add("--kinds", default=",".join(KINDS), metavar="LIST", help=f"{about} (default: all)")
    add(
        "--distances", type=parse_contexts, default=(256, 1024, 4096, 16384), metavar="LIST",
        help="tokens between what was told and the question (default: 256,1k,4k,16k)",
    )  # fmt: skip
    add("--n", type=int, default=10, help="dialogues of each kind (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the first dialogue; the next ones follow (default: %(default)s)")
    add_mode_options(made)
    add("--text", metavar="FILE", help="what is read in between (default: made-up prose of a small vocabulary)")
    add("--max-tokens", type=int, default=48, metavar="N", help="longest answer (default: %(default)s)")
    add(
        "--chat-template-config", default='{"enable_thinking": false}', metavar="JSON",
        help="arguments for the chat template (default: %(default)s)",
    )  # fmt: skip
    add("--output", "-o", metavar="NAME", help="write NAME.json with every answer, NAME.csv, and a heat map")
    add("--chart", choices=("svg", "png"), default="svg", help="format of the heat map (default: %(default)s)")
    add("--json", action="store_true", help="print JSON instead of a table")
    add_device_options(made)
    return made


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    modes, limit = chosen_modes(args), memory_limit(args)
    kinds = [kind.strip() for kind in args.kinds.split(",") if kind.strip()]
    for kind in kinds or [""]:
        if kind not in KINDS:
            raise RequestError(f"--kinds: {kind!r} is not known; choose from {', '.join(KINDS)}")
    for name in ("n", "max_tokens"):
        if getattr(args, name) < 1:
            raise RequestError(f"--{name.replace('_', '-')} is {getattr(args, name)}, expected at least 1")
    output = Path(args.output).expanduser() if args.output else None
    if output is not None and not output.parent.is_dir():
        raise RequestError(f"--output: there is no folder {output.parent}")
    text, template = _text(args.text), template_options(args.chat_template_config)

    from ..loading import load
    from . import heat, machine, recall
    from .progress import Log

    log = Log()
    model, tokenizer = load(args.model, revision=args.revision, dtype=args.dtype, memory_limit=limit)
    if not tokenizer.has_chat_template:
        raise RequestError(f"{args.model}: has no chat template, so it cannot be told and asked")
    answers: list[recall.Answer] = []
    finished = True
    try:
        for seed in range(args.seed, args.seed + args.n):
            for kind in kinds:
                for mode, options in modes.items():
                    sentences = prose(seed) if text is None else sentences_of(text, seed)
                    with log.bar(f"{kind} {seed}, {mode}", args.distances[-1]) as progress:
                        answers += recall.ask(
                            model, tokenizer, dialogue(kind, seed), sentences, args.distances, options, mode=mode, seed=seed,
                            max_tokens=args.max_tokens, limit=limit, template=template, progress=progress,
                        )  # fmt: skip
    except KeyboardInterrupt:
        log.line("stopped; what was asked is kept")
        finished = False
    settings = {
        key: getattr(args, key)
        for key in ("model", "revision", "dtype", "max_kv_size", "kv_bits", "text", "max_tokens")
    }
    found = {"settings": settings, "machine": machine.describe(), "cells": recall.cells(answers)}
    found["answers"] = recall.as_dicts(answers)
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        heat.show(found)
    if output is not None:
        _save(found, output, args.chart, log)
    return 0 if finished else 130


def _text(file: str | None) -> str | None:
    if file is None:
        return None
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--text {file}: cannot be read ({error})") from error
    if not text.strip():
        raise RequestError(f"--text {file}: is empty")
    return text


def _save(found: dict, output: Path, suffix: str, log) -> None:
    from . import chart, heat
    from .rows import write

    write(output.with_name(output.name + ".json"), json.dumps(found, indent=1) + "\n")
    table = io.StringIO()
    rows = csv.DictWriter(table, ["mode", "kind", "distance", "right", "asked"], lineterminator="\n")
    rows.writeheader()
    rows.writerows(found["cells"])
    write(output.with_name(output.name + ".csv"), table.getvalue())
    plt = chart.pyplot()
    if plt is None:
        log.line(chart.MISSING)
    else:
        heat.draw(plt, found, output.with_name(f"{output.name}.{suffix}"))
        log.line(f"heat map: {output}.{suffix}")
