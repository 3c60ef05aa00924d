"""Tokens a second of rows that decode together, against mlx_lm's BatchGenerator: the same weights, the same process, in turn.

    python tests/bench/batch.py                        the demo
    python tests/bench/batch.py --model FOLDER         any model that both can load
    python tests/bench/batch.py --rows 1 8 --context 2000

Rows have contexts of different lengths, about --context tokens; only steps in which all of them get a token are timed.
``dispatches``: what one step of the model would launch on a GPU, counted in its graph; one row decides, more should cost no more.
Ratios above 1 mean that mlx_linattn is faster.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import mlx.core as mx

sys.path.insert(0, str(Path(__file__).parent.parent))

from counting import Dispatches

import mlx_linattn as la
from mlx_linattn.bench import peer
from mlx_linattn.engine.batch import Batch
from mlx_linattn.interop.door import mlx_lm


def prompts(rows: int, context: int) -> list[list[int]]:
    return [[(i * 31 + row * 7) % 1000 for i in range(max(1, context - 3 * row))] for row in range(rows)]


def ours(model, asked: list[list[int]], steps: int) -> float:
    """Seconds for so many steps."""
    batch = Batch(model, max_rows=len(asked), prefill_step=2048, memory_limit=float("inf"))
    for tokens in asked:
        batch.add(tokens)
    while batch.waiting:
        batch.step()
    batch.step()
    began = time.perf_counter()
    for _ in range(steps):
        assert sum(event.token is not None for event in batch.step()) == len(asked)
    return time.perf_counter() - began


def theirs(model, asked: list[list[int]], steps: int) -> float:
    batch = mlx_lm("generate").BatchGenerator(
        model, max_tokens=10 * steps + 1000, completion_batch_size=len(asked), prefill_batch_size=len(asked)
    )
    batch.insert(asked)
    while len(batch.next()[1]) < len(asked):
        pass
    batch.next()
    began = time.perf_counter()
    for _ in range(steps):
        assert len(batch.next()[1]) == len(asked)
    seconds = time.perf_counter() - began
    batch.close()
    return seconds


def dispatches(model, asked: list[list[int]]) -> int:
    """Of one step of the model, as our kernels for a GPU run it."""
    batch = Batch(model, max_rows=len(asked), memory_limit=float("inf"))
    for row, _ in enumerate(asked):
        batch.add([8] * (3 * row + 1))
    while batch.waiting:
        batch.step()
    tokens = mx.array([[9]] * len(asked))
    mx.eval(batch.state.arrays)
    return sum(Dispatches("metal").count(lambda: [model(tokens, batch.state), *batch.state.arrays]).values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    model, config = la.load_model(args.model, dtype=args.dtype)
    stock = peer.build(model, config)
    print(f"{args.model}, {args.dtype}, contexts of about {args.context} tokens, median of {args.runs}")
    print(f"mlx {mx.__version__}, mlx_lm {mlx_lm('_version').__version__}, {mx.default_device()}; tokens a second")
    print(f"{'rows':>4}{'mlx_linattn':>14}{'mlx_lm':>10}{'ratio':>8}{'over 1 row':>12}{'dispatches':>12}", flush=True)
    alone = None
    for rows in args.rows:
        asked = prompts(rows, args.context)
        times = [(ours(model, asked, args.steps), theirs(stock, asked, args.steps)) for _ in range(args.runs + 1)]
        a, b = (rows * args.steps / statistics.median(column) for column in zip(*times[1:]))  # the first warms up
        alone = alone or a / rows
        print(
            f"{rows:>4}{a:>14,.0f}{b:>10,.0f}{a / b:>8.2f}{a / alone:>12.2f}{dispatches(model, asked):>12}",
            flush=True,
        )


if __name__ == "__main__":
    main()
