"""Peak memory of a conversion: a synthetic mixture of experts of some gigabytes, converted in a process of its own.

    python tests/bench/convert_memory.py [--gigabytes 8] [--experts 128] [--packed] [--text] [--no-verify] [--folder DIR]

Prints the source's size, its largest tensor, the peak resident memory and the time; exits 1 where the peak is above
--limit gigabytes. Verifying, both models read 128 random tokens, or with --text the bundled page (about 1000).
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from mlx_linattn.loading import resolve

HIDDEN, SIZE, VOCABULARY = 2048, 768, 32_000
CONFIG = {
    "model_type": "qwen3_5_moe_text", "hidden_size": HIDDEN, "vocab_size": VOCABULARY, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": SIZE, "shared_expert_intermediate_size": SIZE, "max_position_embeddings": 4096,
    "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip


def shapes(layer: int, experts: int, packed: bool) -> dict[str, tuple[int, ...]]:
    at = f"model.layers.{layer}."
    result = {f"{at}{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    mixer = {
        "A_log": (32,), "dt_bias": (32,), "norm.weight": (128,), "conv1d.weight": (8192, 1, 4), "in_proj_a.weight": (32, HIDDEN),
        "in_proj_b.weight": (32, HIDDEN), "in_proj_qkv.weight": (8192, HIDDEN), "in_proj_z.weight": (4096, HIDDEN),
        "out_proj.weight": (HIDDEN, 4096),
    }  # fmt: skip
    result |= {f"{at}linear_attn.{name}": shape for name, shape in mixer.items()}
    result |= {f"{at}mlp.gate.weight": (experts, HIDDEN), f"{at}mlp.shared_expert_gate.weight": (1, HIDDEN)}
    if packed:
        result[f"{at}mlp.experts.gate_up_proj"] = (experts, 2 * SIZE, HIDDEN)
        result[f"{at}mlp.experts.down_proj"] = (experts, HIDDEN, SIZE)
    for part in ["shared_expert", *(f"experts.{e}" for e in range(0 if packed else experts))]:
        result |= {f"{at}mlp.{part}.{name}_proj.weight": (SIZE, HIDDEN) for name in ("gate", "up")}
        result[f"{at}mlp.{part}.down_proj.weight"] = (HIDDEN, SIZE)
    return result


def write(file: Path, tensors: dict[str, tuple[int, ...]]) -> int:
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in tensors.items():
        end = offset + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    block = np.random.default_rng(0).normal(scale=0.02, size=1 << 24).astype(np.float32).view(np.uint32) >> 16
    data = block.astype(np.uint16).tobytes()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for done in range(0, offset, len(data)):
            stream.write(data[: min(len(data), offset - done)])
    return offset


def make(folder: Path, gigabytes: float, experts: int, packed: bool, text: bool) -> tuple[int, int]:
    """Bytes in all, and of the largest tensor."""
    sizes = [2 * int(np.prod(shape)) for shape in shapes(0, experts, packed).values()]
    layers = max(1, round(gigabytes * 1e9 / sum(sizes)))
    told = {"num_hidden_layers": layers, "layer_types": ["linear_attention"] * layers, "num_experts": experts}
    (folder / "config.json").write_text(json.dumps(CONFIG | told))
    for file in resolve("demo").glob("tokenizer*") if text else ():
        shutil.copyfile(file, folder / file.name)
    ends = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN)}
    total = write(folder / "model-ends.safetensors", ends | {"model.norm.weight": (HIDDEN,)})
    files = ((folder / f"model-{i:03d}.safetensors", shapes(i, experts, packed)) for i in range(layers))
    return total + sum(write(file, tensors) for file, tensors in files), max(*sizes, 2 * VOCABULARY * HIDDEN)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=8)
    parser.add_argument("--limit", type=float, default=3)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--packed", action="store_true", help="a layer's experts as two tensors")
    parser.add_argument("--text", action="store_true", help="verify on the bundled page")
    parser.add_argument("--no-verify", action="store_true")
    parser.add_argument("--folder", type=Path, default=None, help="where there is room for twice as much")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        (folder / "source").mkdir()
        size, largest = make(
            folder / "source", arguments.gigabytes, arguments.experts, arguments.packed, arguments.text
        )
        words = [
            sys.executable,
            "-m",
            "mlx_linattn.cli",
            "convert",
            str(folder / "source"),
            "-o",
            str(folder / "out"),
            "-q",
        ]
        began = time.monotonic()
        subprocess.run(words + ["--no-verify"] * arguments.no_verify, check=True)
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        print(
            f"{size / 1e9:.1f} GB (largest tensor {largest / 1e9:.2f} GB) converted in {time.monotonic() - began:.0f} s "
            f"with {peak / 1e9:.2f} GB resident at most"
        )
        return int(peak > arguments.limit * 1e9)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
