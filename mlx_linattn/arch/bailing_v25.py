"""Ling-2.5, Ring-2.5, Ling-2.6 and Ring-2.6: Ring-linear-2.0 with latent attention in the place of grouped queries.

References: SGLang's and vLLM's serving code, and mlx_lm's bailing_hybrid; all three count the layers of the decays from 0
(``lightning_decay``), which is the default here. ``model_type`` is Ling-3's too, ``architectures`` tells them apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..layout import Published, Take
from ..spec import MlaSpec, ModelSpec
from . import bailing_linear
from .bailing_v3 import dropped  # noqa: F401 - the same layers for multi-token prediction follow the model's own
from .common import absorbed_latents
from .config import Config

MODEL_TYPES = ("bailing_hybrid",)
ARCHITECTURES = ("BailingMoeV2_5ForCausalLM",)
MLX_TYPES: dict[str, str] = {}  # stock mlx_lm knows this one by its own name and architecture
MLX_PREFIX = ""
PREFIXES = ()
PUBLISHED, DROPPED, QUANTIZE = bailing_linear.PUBLISHED, bailing_linear.DROPPED, bailing_linear.QUANTIZE

DECAY_LAYER = "layer"


def published(spec: ModelSpec) -> tuple[Published, ...]:
    return absorbed_latents(spec)


def spec(config: dict) -> ModelSpec:
    text = Config(config)
    text.only("use_bias", False)
    text.only("use_qkv_bias", False)
    rope_dim = text.integer("qk_rope_head_dim")
    # partial_rotary_factor is for the Lightning layers; here the rotated part of a key is a matrix of its own
    rope = replace(
        text.rope(rope_dim, theta=6e6, partial=1.0),
        dims=rope_dim,
        interleaved=text.only("rope_interleave", True, False),
    )
    attention = MlaSpec(
        heads=text.integer("num_attention_heads"),
        rank=text.integer("kv_lora_rank"),
        nope_dim=text.integer("qk_nope_head_dim"),
        rope_dim=rope_dim,
        value_dim=text.integer("v_head_dim"),
        rope=rope,
        norm_eps=text.number("rms_norm_eps"),
        query_rank=text.integer("q_lora_rank", 0) or None,
    )
    return bailing_linear.model_spec(config, DECAY_LAYER, attention)


def names(spec: ModelSpec) -> Iterator[tuple[str, str | Take]]:
    """Parameter (or the module it lies in) -> its place in MLX layout."""
    yield from bailing_linear.names(spec)
    for i, layer in enumerate(spec.layers):
        if isinstance(layer.mixer, MlaSpec):
            yield f"layers.{i}.mixer", f"model.layers.{i}.attention"
            yield f"layers.{i}.mixer.o_proj", f"model.layers.{i}.attention.dense"
