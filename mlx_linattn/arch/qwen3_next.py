"""Qwen3-Next and Qwen3-Coder-Next: Qwen3.5's layers, with the projections of a key head's group stored side by side.

Reference: transformers' Qwen3NextForCausalLM.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..layout import Take
from ..spec import GatedDeltaSpec, ModelSpec
from . import qwen3_5

MODEL_TYPES = ("qwen3_next",)
MLX_TYPES: dict[str, str] = {}  # stock mlx_lm knows this one by its own name
MLX_PREFIX = ""
PREFIXES = ()
PUBLISHED, DROPPED, QUANTIZE = qwen3_5.PUBLISHED, qwen3_5.DROPPED, qwen3_5.QUANTIZE
mlx_config = qwen3_5.mlx_config


def spec(config: dict) -> ModelSpec:
    return qwen3_5.spec(config)


def names(spec: ModelSpec) -> Iterator[tuple[str, str | Take]]:
    yield from qwen3_5.names(spec)
    for i, layer in enumerate(spec.layers):
        mixer = layer.mixer
        if not isinstance(mixer, GatedDeltaSpec):
            continue
        ours, theirs = f"layers.{i}.mixer", f"model.layers.{i}.linear_attn"
        shared = mixer.value_heads // mixer.key_heads  # value heads of one key head
        values = shared * mixer.value_dim
        rows = (mixer.key_dim, mixer.key_dim, values, values)  # of each group: q, k, v, z
        yield f"{ours}.in_proj_qkv", Take(f"{theirs}.in_proj_qkvz", ("ungroup", mixer.key_heads, rows, (0, 1, 2)))
        yield f"{ours}.in_proj_z", Take(f"{theirs}.in_proj_qkvz", ("ungroup", mixer.key_heads, rows, (3,)))
        yield f"{ours}.in_proj_b", Take(f"{theirs}.in_proj_ba", ("ungroup", mixer.key_heads, (shared, shared), (0,)))
        yield f"{ours}.in_proj_a", Take(f"{theirs}.in_proj_ba", ("ungroup", mixer.key_heads, (shared, shared), (1,)))
