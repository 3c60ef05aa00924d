"""Mamba and Falcon-Mamba: Mamba-1 layers and nothing else, not even an MLP.

References: transformers' MambaForCausalLM and FalconMambaForCausalLM.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..errors import CheckpointError
from ..layout import Published, Quantize, Take
from ..spec import LayerSpec, MambaSpec, ModelSpec
from .config import Config

MODEL_TYPES = ("mamba", "falcon_mamba")
MLX_TYPES: dict[str, str] = {}  # stock mlx_lm knows both by their own names
MLX_PREFIX = ""
PREFIXES = ()
PUBLISHED = (Published(r".*\.conv1d\.weight", Take("{0}", ("move_axis", 2, 1))),)
DROPPED = ((r"lm_head\.weight", "a copy of the embedding, which is the output head"),)
QUANTIZE = (
    Quantize(r".*\.conv1d", None, "short convolution: few numbers, all of the recurrence passes through them"),
    Quantize(r".*\.mixer\.(x_proj|dt_proj)", 8, "step sizes and gates: errors add up over the whole context"),
)


def spec(config: dict) -> ModelSpec:
    text = Config(config)
    text.only("hidden_act", "silu")
    hidden, eps = text.integer("hidden_size"), text.number("layer_norm_epsilon", 1e-5)
    falcon = config["model_type"] == "falcon_mamba"  # the one difference; its config has no key that says so
    mixer = MambaSpec(
        inner=text.integer("intermediate_size", int(text.number("expand", 2) * hidden)),
        state_size=text.integer("state_size", 16),
        step_rank=step_rank(text, "time_step_rank"),
        conv_width=text.integer("conv_kernel", 4),
        conv_bias=text.only("use_conv_bias", True, False),
        bias=text.only("use_bias", False, True),
        step_norm="plain" if falcon else None,
        norm_eps=text.number("mixer_rms_eps", 1e-6),
    )
    return ModelSpec(
        model_type=config["model_type"],
        vocab_size=text.integer("vocab_size"),
        hidden_size=hidden,
        layers=(LayerSpec(mixer, None),) * text.integer("num_hidden_layers"),
        norm_eps=eps,
        tied=text.only("tie_word_embeddings", True, False),
        max_positions=text.integer("max_position_embeddings", 1 << 20),  # no limit is known or needed
        residual_float32=text.only("residual_in_fp32", True, False),
    )


def step_rank(text: Config, key: str) -> int:
    """Width of the step size's inner projection, which a config may leave to the usual rule."""
    value = text.get(key, "auto")
    if value == "auto":
        return math.ceil(text.integer("hidden_size") / 16)
    if not isinstance(value, int):
        raise CheckpointError(f"config.json: {key} is {value!r}, expected a whole number or 'auto'")
    return value


def mamba_names(ours: str, theirs: str) -> Iterator[tuple[str, str | Take]]:
    """The parameters of one Mamba layer."""
    yield ours, theirs
    yield f"{ours}.conv_weight", Take(f"{theirs}.conv1d.weight", ("squeeze", 2))
    yield f"{ours}.conv_bias", f"{theirs}.conv1d.bias"
    yield f"{ours}.dt_bias", f"{theirs}.dt_proj.bias"
    for name in ("dt", "B", "C"):
        yield f"{ours}.{name}_norm", f"{theirs}.{name.lower()}_layernorm.weight"


def names(spec: ModelSpec) -> Iterator[tuple[str, str | Take]]:
    """Parameter (or the module it lies in) -> its place in MLX layout."""
    yield "embed", "backbone.embeddings"
    yield "norm", "backbone.norm_f"
    yield "head", "lm_head"
    for i in range(len(spec.layers)):
        yield f"layers.{i}.mixer_norm", f"backbone.layers.{i}.norm"
        yield from mamba_names(f"layers.{i}.mixer", f"backbone.layers.{i}.mixer")
