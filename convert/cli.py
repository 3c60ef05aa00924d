"""``mlx-linattn convert``: mlx_lm.convert's options, and a table before and a progress line while it works."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path

from mlx_linattn.errors import LinAttnError, RequestError

from . import Conversion, prepare
from .bits import BALANCED, MODES, RECIPES
from .hub import upload
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
    add("--no-verify", dest="verify", action="store_false", help="do not read the result back and compare it")
    add("--calibration", metavar="FILE", help="text on which source and result are compared, besides the bundled page")
    add("--max-kl", type=float, metavar="X", help="refuse a result whose mean KL divergence from the source is larger")
    add("--force", action="store_true", help="replace a model that is in the target folder")
    add(
        "--sensitivity",
        action="store_true",
        help="measure which weights mind being rounded, print a recipe, write nothing",
    )
    add("--target-bits", type=float, metavar="X", help="bits per weight of that recipe (default: those of -q)")
    add("--dry-run", action="store_true", help="print the plan and write nothing")
    add("--upload-repo", metavar="ID", help="put the result into this repository on the Hub")
    add("--private", action="store_true", help="make that repository private, if it is new")
    add("--revision", help="branch, tag or commit on the Hub")
    return made


def main(argv: list[str] | None = None) -> int:
    """Run the command; errors that a user can mend end in one line on stderr and status 2."""
    words = sys.argv[1:] if argv is None else argv
    arguments = parser().parse_args(words)
    try:
        return _run(arguments, words)
    except LinAttnError as error:
        print(f"mlx-linattn convert: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            f"\nstopped; start again to go on from there, or delete {arguments.mlx_path}.partial",
            file=sys.stderr,
        )
        return 130


def _run(arguments: argparse.Namespace, words: list[str]) -> int:

    source = arguments.source or arguments.hf_path
    if source is None:
        raise RequestError("no model given; say which folder or Hub id to convert (see --help)")
    if arguments.source and arguments.hf_path and arguments.source != arguments.hf_path:
        raise RequestError(f"two models given, {arguments.source!r} and {arguments.hf_path!r}; give one")
    if not (arguments.dry_run or arguments.sensitivity):
        require_free(Path(arguments.mlx_path).expanduser(), arguments.force)
    conversion = prepare(
        source,
        arguments.mlx_path,
        quantize=arguments.quantize or arguments.sensitivity,
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
        headers_only=arguments.dry_run,
    )
    plan = conversion.plan
    if arguments.sensitivity:
        return _sensitivity(conversion, arguments)
    if arguments.dry_run:
        print(table(plan))
        return 0
    print(table(plan) + "\n", file=sys.stderr)
    for note in conversion.notes:
        print(f"note: {note}", file=sys.stderr)
    checked = conversion.write(
        Progress(),
        verify=arguments.verify,
        calibration=arguments.calibration,
        max_kl=arguments.max_kl,
        force=arguments.force,
        command=shlex.join(["mlx-linattn", "convert", *words]),
    )
    if checked is not None:
        print(checked.summary(), file=sys.stderr)
    print(f"{arguments.mlx_path}: {size(plan.nbytes)}, {plan.bits_per_weight:.2f} bits per weight")
    if arguments.upload_repo is not None:
        print(upload(conversion.target, arguments.upload_repo, arguments.private))
    return 0


def _sensitivity(conversion: Conversion, arguments: argparse.Namespace) -> int:
    """The table on stderr, the recipe on stdout, so that it can be sent to a file."""
    from .sensitivity import Trials, best_recipe, kinds, measure, rules, table
    from .verify import Check, tokens

    plan, checkpoint = conversion.plan, conversion.tensors.checkpoint
    asked = conversion.options.quantization
    if asked.mode != "affine":
        raise RequestError("--sensitivity compares affine widths; leave --q-mode away")
    found = kinds(plan, asked.group_size)
    ids, text = tokens(checkpoint, Check(None if arguments.calibration is None else Path(arguments.calibration)))
    trials = Trials(checkpoint, ids, asked.group_size)
    measure(trials, found, progress=Progress(unit="trials"))
    target = plan.bits_per_weight if arguments.target_bits is None else arguments.target_bits
    chosen, harm = best_recipe(plan, found, trials, target)
    print(f"on {ids.size} tokens of {text}, {table(found, chosen)}", file=sys.stderr)
    source = arguments.source or arguments.hf_path
    print(f"# {source}: KL divergence {harm:.3g} at {target:.2f} bits per weight; use with -q --recipe-file")
    print("\n".join(rules(found, chosen, asked.group_size)))
    return 0


class Progress:
    """A line that redraws itself on a terminal; elsewhere a plain line every ten seconds."""

    def __init__(self, stream=None, unit: str | None = None):
        self.stream = stream or sys.stderr
        self.say = size if unit is None else lambda number: f"{number} {unit}"
        self.is_terminal = self.stream.isatty()
        self.last = 0.0 if self.is_terminal else time.monotonic()

    def __call__(self, done: int, total: int, name: str) -> None:
        now, finished = time.monotonic(), done == total
        if not finished and now - self.last < (0.1 if self.is_terminal else 10.0):
            return
        self.last = now
        share = 1.0 if total == 0 else done / total
        text = f"{share:6.1%}  {self.say(done)} of {self.say(total)}  {name}"
        if not self.is_terminal:
            print(text.strip(), file=self.stream, flush=True)
            return
        filled = int(24 * share)
        line = f"[{'#' * filled}{'.' * (24 - filled)}] {text}"[:110]
        print(f"\r{line:<110}", end="\n" if finished else "", file=self.stream, flush=True)
