"""``mlx-linattn convert``: mlx_lm.convert's options, and a table before and a progress line while it works."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from mlx_linattn.errors import LinAttnError, RequestError

from . import prepare
from .bits import BALANCED, MODES, RECIPES
from .stream import require_free
from .table import size, table

EPILOG = """examples:
  mlx-linattn convert Qwen/Qwen3.5-4B -o qwen3.5-4b-4bit -q
  mlx-linattn convert --hf-path ./checkpoint --mlx-path ./out -q --q-bits 8 --keep-mtp
  mlx-linattn convert demo -q --dry-run
"""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="mlx-linattn convert",
        description="Convert a published checkpoint to MLX weights, quantized if you like. "
        "The result loads in mlx_linattn and in stock mlx_lm.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = made.add_argument
    add("source", nargs="?", metavar="SRC", help="folder or Hub id of the model (or 'demo')")
    add("--hf-path", "--model", metavar="SRC", help="the same, under mlx_lm's name")
    add(
        "-o",
        "--mlx-path",
        "--output",
        metavar="DIR",
        default="mlx_model",
        help="new or empty folder (default: mlx_model)",
    )
    add("-q", "--quantize", action="store_true", help="quantize the weights that bear it")
    add("--q-bits", "--bits", type=int, metavar="N", help="bits per weight (default: 4 for affine)")
    add(
        "--q-group-size",
        "--group-size",
        type=int,
        metavar="N",
        help="weights that share a scale (default: 64 for affine)",
    )
    add("--q-mode", "--mode", choices=tuple(MODES), default="affine", help="number format (default: affine)")
    add("--recipe", choices=RECIPES, default=BALANCED, help="balanced (default): mixers and head get a step more bits")
    add(
        "--rule",
        action="append",
        default=[],
        metavar="REGEX=VALUE",
        help="for weights by name, before the recipe: bits, mxfp4, mxfp8, nvfp4 or bf16, and ,g=32 for groups; repeatable",
    )
    add("--recipe-file", metavar="FILE", help="a file with one such rule a line")
    add("-d", "--dequantize", action="store_true", help="turn quantized weights into plain numbers")
    add(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        help="of what is not quantized (default: what config.json says)",
    )
    add("--keep-mtp", action="store_true", help="keep the multi-token-prediction head, unchanged, in mtp.safetensors")
    add("--dry-run", action="store_true", help="print the plan and write nothing")
    add("--revision", help="branch, tag or commit on the Hub")
    return made


def main(argv: list[str] | None = None) -> int:
    """Run the command; errors that a user can mend end in one line on stderr and status 2."""
    arguments = parser().parse_args(argv)
    try:
        return _run(arguments)
    except LinAttnError as error:
        print(f"mlx-linattn convert: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            f"\nstopped; start again to go on from there, or delete {arguments.mlx_path}.partial",
            file=sys.stderr,
        )
        return 130


def _run(arguments: argparse.Namespace) -> int:

    source = arguments.source or arguments.hf_path
    if source is None:
        raise RequestError("no model given; say which folder or Hub id to convert (see --help)")
    if arguments.source and arguments.hf_path and arguments.source != arguments.hf_path:
        raise RequestError(f"two models given, {arguments.source!r} and {arguments.hf_path!r}; give one")
    if not arguments.dry_run:
        require_free(Path(arguments.mlx_path).expanduser())
    conversion = prepare(
        source,
        arguments.mlx_path,
        quantize=arguments.quantize,
        q_group_size=arguments.q_group_size,
        q_bits=arguments.q_bits,
        q_mode=arguments.q_mode,
        dtype=arguments.dtype,
        recipe=arguments.recipe,
        rules=arguments.rule,
        recipe_file=arguments.recipe_file,
        revision=arguments.revision,
        dequantize=arguments.dequantize,
        keep_mtp=arguments.keep_mtp,
    )
    plan = conversion.plan
    if arguments.dry_run:
        print(table(plan))
        return 0
    print(table(plan) + "\n", file=sys.stderr)
    for note in conversion.notes:
        print(f"note: {note}", file=sys.stderr)
    conversion.write(Progress())
    print(f"{arguments.mlx_path}: {size(plan.nbytes)}, {plan.bits_per_weight:.2f} bits per weight")
    return 0


class Progress:
    """A line that redraws itself on a terminal; elsewhere a plain line every ten seconds."""

    def __init__(self, stream=None):
        self.stream = stream or sys.stderr
        self.is_terminal = self.stream.isatty()
        self.last = 0.0 if self.is_terminal else time.monotonic()

    def __call__(self, done: int, total: int, name: str) -> None:
        now, finished = time.monotonic(), done == total
        if not finished and now - self.last < (0.1 if self.is_terminal else 10.0):
            return
        self.last = now
        share = 1.0 if total == 0 else done / total
        text = f"{share:6.1%}  {size(done)} of {size(total)}  {name}"
        if not self.is_terminal:
            print(text.strip(), file=self.stream, flush=True)
            return
        filled = int(24 * share)
        line = f"[{'#' * filled}{'.' * (24 - filled)}] {text}"[:110]
        print(f"\r{line:<110}", end="\n" if finished else "", file=self.stream, flush=True)
