"""Ling-3: layers of Kimi Delta Attention with bounded decays, then one of gated latent attention; mixture of experts.

Reference: transformers' BailingHybridForCausalLM, and, for the limits on the experts' activations which that class
ignores, the model's serving code in vLLM and SGLang.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..errors import CheckpointError
from ..layout import Published, Quantize, Take
from ..spec import KdaSpec, LayerSpec, MlaSpec, MlpSpec, ModelSpec, MoeSpec
from .common import absorbed_latents, dense_mlp, kda_names, moe_names, stacked_experts
from .config import Config

MODEL_TYPES = ("bailing_hybrid",)
ARCHITECTURES = ("BailingMoeV3ForCausalLM", "BailingHybridForCausalLM")
MLX_TYPES: dict[str, str] = {}  # stock mlx_lm knows this one by its own name, with the first of the architectures
MLX_PREFIX = ""
PREFIXES = ()

PUBLISHED = (
    *stacked_experts(),
    Published(r".*\.[qkv]_conv1d\.weight", Take("{0}", ("move_axis", 2, 1))),
    # transformers saves the KDA layers' output projection under the attention layers' name
    Published(r"(.*)\.attention\.o_proj\.weight", Take("{0}"), Take("{1}.attention.dense.weight")),
)
DROPPED = ()
QUANTIZE = (
    Quantize(r".*\.[qkv]_conv1d", None, "short convolution: few numbers, all of the recurrence passes through them"),
    Quantize(r".*\.mlp\.gate", None, "router: a rounded score chooses another expert, and stock mlx_lm wants it whole"),
    Quantize(r".*\.attention\.(b_proj|f_proj)", 8, "decay and write strength: errors add up over the whole context"),
)


def published(spec: ModelSpec) -> tuple[Published, ...]:
    return absorbed_latents(spec)


def dropped(spec: ModelSpec) -> tuple[tuple[str, str], ...]:
    later = rf"model\.layers\.(?!({'|'.join(str(i) for i in range(len(spec.layers)))})\.).*"
    return ((later, "multi-token-prediction layer, which generation does not use"),)


def spec(config: dict) -> ModelSpec:
    text = Config(config)
    text.only("hidden_act", "silu")
    for switch in ("use_bias", "use_qkv_bias", "attention_bias", "use_mla_nope", "use_kda_lora", "use_nGPT"):
        text.only(switch, False)
    for switch in ("scale_router_input", "up_proj_norm", "value_norm", "pregate_inference"):
        text.only(switch, False)
    text.only("rope_interleave", True)
    text.only("no_kda_lora", True)
    text.only("gated_attention_proj_granularity_type", "head_wise")
    heads = text.integer("num_attention_heads")
    # transformers, when it saves a config, writes the rotary width under head_dim and moves this one
    head_dim = text.integer("linear_head_dim", text.get("head_dim"))
    eps = text.number("rms_norm_eps", 1e-6)
    rope_dim = text.integer("qk_rope_head_dim")
    # partial_rotary_factor says which part of a key is rotated; here that part is a matrix of its own
    rope = replace(text.rope(rope_dim, theta=6e6, partial=1.0), dims=rope_dim, interleaved=True)
    kda = KdaSpec(
        key_heads=heads,
        value_heads=heads,
        key_dim=head_dim,
        value_dim=head_dim,
        conv_width=text.integer("short_conv_kernel_size", 4),
        norm_eps=eps,
        decay_rank=None,
        gate_rank=None,
        lower_bound=text.number("kda_lower_bound", -5.0) if text.only("kda_safe_gate", True, False) else None,
    )
    mla = MlaSpec(
        heads=heads,
        rank=text.integer("kv_lora_rank"),
        nope_dim=text.integer("qk_nope_head_dim"),
        rope_dim=rope_dim,
        value_dim=text.integer("v_head_dim"),
        rope=rope,
        norm_eps=1e-6,  # of the class, whatever rms_norm_eps says
        query_rank=text.integer("q_lora_rank", 0) or None,
        output_gate="head",
    )
    mixers = {"linear_attention": kda, "full_attention": mla}
    return ModelSpec(
        model_type=config["model_type"],
        vocab_size=text.integer("vocab_size"),
        hidden_size=text.integer("hidden_size"),
        layers=tuple(LayerSpec(mixers[kind], _mlp(text, i)) for i, kind in enumerate(_kinds(text))),
        norm_eps=eps,
        tied=text.only("tie_word_embeddings", False, True),
        max_positions=text.integer("max_position_embeddings", text.integer("model_max_length", 262144)),
    )


def _kinds(text: Config) -> list[str]:
    count, group = text.integer("num_hidden_layers"), text.integer("layer_group_size", 6)
    if text.get("layer_types", None) is None and (not group or count % group):
        # transformers takes the layers after the last whole group for linear ones, the others for attention
        raise CheckpointError(
            f"config.json: num_hidden_layers {count} is no multiple of layer_group_size {group}, and there is no layer_types"
        )
    derived = ["full_attention" if (i + 1) % group == 0 else "linear_attention" for i in range(count)]
    return text.get("layer_types", derived)


def _mlp(text: Config, index: int) -> MlpSpec | MoeSpec:
    if dense_mlp(text, index, text.integer("first_k_dense_replace", 2)):
        return MlpSpec(text.integer("intermediate_size"))
    size = text.integer("moe_intermediate_size")
    shared = text.integer("moe_shared_expert_intermediate_size", size)
    return MoeSpec(
        experts=text.integer("num_experts", text.integer("num_local_experts", 0)),
        top_k=text.integer("num_experts_per_tok", text.get("num_experts_per_token", None)),
        size=size,
        shared_size=shared * text.integer("num_shared_experts", 1),
        router=text.only("score_function", "sigmoid"),
        renormalize=text.only("norm_topk_prob", True) and text.only("moe_renormalize", True),
        scaling=text.number("routed_scaling_factor", 1.0),
        correction_bias=text.only("moe_router_enable_expert_bias", True),
        groups=text.integer("n_group", text.integer("num_expert_group", 1)),
        top_groups=text.integer("topk_group", 1),
        limit=_limit(text, "expert_swiglu_limit_list", index),
        shared_limit=_limit(text, "share_expert_swiglu_limit_list", index),
    )


def _limit(text: Config, key: str, index: int) -> float | None:
    """A layer's limit; 0 and null stand for none."""
    limits = text.get(key, [])
    return float(limits[index]) if index < len(limits) and limits[index] else None


def names(spec: ModelSpec) -> Iterator[tuple[str, str | Take]]:
    """Parameter (or the module it lies in) -> its place in MLX layout."""
    yield "embed", "model.word_embeddings"
    yield "norm", "model.norm"
    yield "head", "lm_head"
    for i, layer in enumerate(spec.layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        yield f"{ours}.mixer_norm", f"{theirs}.input_layernorm"
        yield f"{ours}.mlp_norm", f"{theirs}.post_attention_layernorm"
        yield f"{ours}.mlp", f"{theirs}.mlp"
        if isinstance(layer.mlp, MoeSpec):
            yield from moe_names(f"{ours}.mlp", f"{theirs}.mlp", "gate.expert_bias")
        if isinstance(layer.mixer, KdaSpec):
            yield from kda_names(layer.mixer, f"{ours}.mixer", f"{theirs}.attention", "{}_conv1d")
        else:
            yield f"{ours}.mixer", f"{theirs}.attention"
            yield f"{ours}.mixer.o_proj", f"{theirs}.attention.dense"
