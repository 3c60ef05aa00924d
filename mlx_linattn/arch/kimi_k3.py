"""Kimi-K3's text model: Kimi-Linear with bounded decays, gated latent attention, residuals mixed over blocks of layers,
and experts that work in a narrower space.

No public class of transformers runs it; the reference is a float64 version written from the same notes as mlx_lm's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..layout import Published, Quantize, Take
from ..spec import KdaSpec, LayerSpec, ModelSpec, MoeSpec, ResidualSpec
from . import kimi_linear
from .common import absorbed_latents
from .config import Config

MODEL_TYPES = ("kimi_k3",)
MLX_TYPES: dict[str, str] = {}  # stock mlx_lm knows this one by its own name
MLX_PREFIX = "language_model."
PREFIXES = (("language_model.", ""),)

LATENT = r"routed_expert_(?:down_proj|up_proj|norm)"
JOINED = tuple(f"{{1}}.{x}_proj.weight" for x in "qkv")
CONVOLUTIONS = tuple(f"{{1}}.{x}_conv1d.weight" for x in "qkv")
PUBLISHED = (
    Published(r"(.*)\.qkv_proj\.weight", Take(JOINED, ("concat",))),
    Published(r"(.*)\.qkv_conv\.conv\.weight", Take(CONVOLUTIONS, ("concat",), ("move_axis", 2, 1))),
    Published(rf"(.*)\.mlp\.({LATENT}\.weight)", Take("{1}.block_sparse_moe.{2}")),
    *kimi_linear.PUBLISHED,
)
DROPPED = (
    *kimi_linear.DROPPED,
    (r"(vision_tower|vision_model|mm_projector|multi_modal_projector)\..*", "vision, which a text model does not use"),
)
QUANTIZE = (
    Quantize(r".*_res_proj", None, "residual mix: one row, which weighs whole blocks of layers"),
    Quantize(r".*\.qkv_conv\.conv", None, "short convolution: few numbers, all of the recurrence passes through them"),
    *kimi_linear.QUANTIZE,
)


def published(spec: ModelSpec) -> tuple[Published, ...]:
    return absorbed_latents(spec)


def spec(config: dict) -> ModelSpec:
    text = Config(config)
    text.only("hidden_act", "situ")
    text.only("moe_router_activation_func", "sigmoid")
    linear = text.part("linear_attn_config")
    soft_limits = text.number("activation_situ_beta", 1.0), text.number("activation_situ_linear_beta")
    block = text.integer("attn_res_block_size")
    base = kimi_linear.base_spec(config, text)
    full_rank = linear.only("use_full_rank_gate", False, True)
    lower_bound = linear.get("gate_lower_bound", None)
    latent = text.integer("routed_expert_hidden_size", 0) or None
    norm_eps = base.norm_eps if latent and text.only("latent_moe_use_norm", False, True) else None

    def layer(i: int, plain: LayerSpec) -> LayerSpec:
        if isinstance(plain.mixer, KdaSpec):
            gate_rank = None if full_rank else plain.mixer.gate_rank
            mixer = replace(plain.mixer, gate_rank=gate_rank, lower_bound=lower_bound)
        else:
            gate = "feature" if text.only("mla_use_output_gate", False, True) else None
            mixer = replace(plain.mixer, output_gate=gate)
        mlp = replace(plain.mlp, soft_limits=soft_limits)
        if isinstance(mlp, MoeSpec):
            mlp = replace(mlp, latent_size=latent, latent_norm_eps=norm_eps)
        return LayerSpec(mixer, mlp, ResidualSpec("mixed", starts_block=i % block == 0), ResidualSpec("mixed"))

    return replace(base, layers=tuple(layer(i, plain) for i, plain in enumerate(base.layers)))


def names(spec: ModelSpec) -> Iterator[tuple[str, str | Take]]:
    """Parameter (or the module it lies in) -> its place in MLX layout."""
    yield from kimi_linear.names(spec)
    yield "output_mix.norm", "model.output_attn_res_norm"
    yield "output_mix.proj", "model.output_attn_res_proj"
    for i, layer in enumerate(spec.layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        for mix, source in (("mixer_mix", "self_attention_res"), ("mlp_mix", "mlp_res")):
            yield f"{ours}.{mix}.norm", f"{theirs}.{source}_norm"
            yield f"{ours}.{mix}.proj", f"{theirs}.{source}_proj"
        if isinstance(layer.mixer, KdaSpec):
            mixer, place = f"{ours}.mixer", f"{theirs}.self_attn"
            for part, name in enumerate(("q_proj", "k_proj", "v_proj")):
                yield f"{mixer}.{name}", Take(f"{place}.qkv_proj", ("part", 0, part, 3))
            yield f"{mixer}.conv_weight", Take(f"{place}.qkv_conv.conv.weight", ("squeeze", 2))
            # the published tensor is padded to a round number of heads
            yield f"{mixer}.A_log", Take(f"{place}.A_log", ("reshape", -1), ("cut", 0, 0, layer.mixer.value_heads))
        if isinstance(layer.mlp, MoeSpec):
            for ours_, theirs_ in (("down", "down_proj"), ("up", "up_proj"), ("norm", "norm")):
                yield f"{ours}.mlp.latent_{ours_}", f"{theirs}.mlp.routed_expert_{theirs_}"
