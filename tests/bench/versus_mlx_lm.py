"""Prefill and decode speed and peak memory against stock mlx_lm: the same weights, the same process, in turn.

    python tests/bench/versus_mlx_lm.py                     the demo
    python tests/bench/versus_mlx_lm.py --model FOLDER      any model that both can load
    python tests/bench/versus_mlx_lm.py --shape             random weights in the shape of a Qwen3.5-0.8B layer group

Ratios above 1 mean that mlx_linattn is faster, or smaller.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

import mlx_linattn as la
from mlx_linattn.interop.door import mlx_lm
from mlx_linattn.loading import resolve

SHAPE = {
    "model_type": "qwen3_5", "vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
    "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4, "rms_norm_eps": 1e-6, "max_position_embeddings": 262144, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}, "dtype": "float32",
}  # fmt: skip


def for_both(model: str, work: Path) -> Path:
    """A folder of MLX layout, which both libraries load."""
    from mlx_linattn.convert import convert

    convert(resolve(model), work / "model")
    return work / "model"


def random_model(work: Path) -> Path:
    """Random weights in MLX layout, made by stock mlx_lm's own class."""
    folder = work / "shape"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    module = mlx_lm("models.qwen3_5")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(dict(SHAPE)))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    return folder


def run(step, prompt: list[int], tokens: int) -> dict[str, float]:
    """Seconds to the first token and for each further one, and peak bytes above what was held before."""
    mx.clear_cache()
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    began = time.perf_counter()
    stream = step(prompt, tokens)
    next(stream)
    first = time.perf_counter()
    for _ in stream:
        pass
    end = time.perf_counter()
    return {
        "prefill tokens/s": len(prompt) / (first - began),
        "decode tokens/s": (tokens - 1) / (end - first),
        "peak bytes": mx.get_peak_memory() - held,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--shape", action="store_true")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=65)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        folder = random_model(Path(work)) if args.shape else for_both(args.model, Path(work))
        ours, config = la.load_model(folder, dtype=args.dtype)
        theirs, _ = mlx_lm("utils").load_model(folder)
        theirs.set_dtype(getattr(mx, args.dtype))
        if args.dtype == "float32":
            ids = mx.array([[i * 7 % config.get("vocab_size", 1000) for i in range(200)]])
            difference = mx.abs(ours(ids) - theirs(ids)).max().item()
            print(f"largest difference of the logits on 200 tokens: {difference:.1e}")
        peer = mlx_lm("generate").generate_step
        steps = {
            "mlx_linattn": lambda p, n: la.generate_step(p, ours, max_tokens=n),
            "mlx_lm": lambda p, n: peer(mx.array(p), theirs, max_tokens=n),
        }
        prompt = [(i * 31 + 7) % 1000 for i in range(args.prompt_tokens)]
        results: dict[str, list[dict[str, float]]] = {name: [] for name in steps}
        for index in range(args.runs + 1):
            for name, step in steps.items():
                result = run(step, prompt, args.tokens)
                if index:  # the first round warms up
                    results[name].append(result)
    print(
        f"{folder.name}, {args.dtype}, {args.prompt_tokens} prompt tokens, {args.tokens} generated, median of {args.runs}"
    )
    print(f"mlx {mx.__version__}, mlx_lm {mlx_lm('_version').__version__}, {mx.default_device()}")
    print(f"{'':<18}{'mlx_linattn':>14}{'mlx_lm':>14}{'ratio':>8}")
    for key in ("prefill tokens/s", "decode tokens/s", "peak bytes"):
        a, b = (statistics.median(r[key] for r in results[name]) for name in steps)
        print(f"{key:<18}{a:>14,.0f}{b:>14,.0f}{(b / a if key == 'peak bytes' else a / b):>8.2f}")


if __name__ == "__main__":
    main()
