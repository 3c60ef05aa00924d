"""Kimi-Linear: three layers of Kimi Delta Attention, then one of latent attention without positions; mixture of experts.

Reference: transformers' KimiLinearForCausalLM.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import CheckpointError
from ..layout import Published, Quantize, Take
from ..spec import KdaSpec, LayerSpec, MlaSpec, MlpSpec, ModelSpec, MoeSpec
from .common import absorbed_latents, dense_mlp, kda_names, moe_names, stacked_experts
from .config import Config

MODEL_TYPES = ("kimi_linear",)
MLX_TYPES: dict[str, str] = {}  # stock mlx_lm knows this one by its own name
MLX_PREFIX = ""
PREFIXES = ()

MOE = "{1}.block_sparse_moe"
PUBLISHED = (
    *stacked_experts(r"(.*)\.mlp", f"{MOE}.experts"),
    Published(r"(.*)\.([qkv])_conv\.conv\.weight", Take("{1}.{2}_conv1d.weight", ("move_axis", 2, 1))),
    Published(r"(.*)\.mlp\.gate\.weight", Take(f"{MOE}.gate.weight")),
    Published(r"(.*)\.mlp\.e_score_correction_bias", Take(f"{MOE}.gate.e_score_correction_bias")),
    Published(r"(.*)\.mlp\.shared_experts\.(.*)", Take(f"{MOE}.shared_experts.{{2}}")),
    # transformers saves dense layers under the mixtures' name
    Published(r"(.*)\.mlp\.((?:gate|up|down)_proj\.weight)", Take("{0}"), Take(f"{MOE}.{{2}}")),
)
DROPPED = ((r"model\.mtp.*", "multi-token-prediction head, which generation does not use"),)
QUANTIZE = (
    Quantize(
        r".*\.[qkv]_conv\.conv", None, "short convolution: few numbers, all of the recurrence passes through them"
    ),
    Quantize(r".*\.mlp\.gate", 8, "router: a rounded score chooses another expert"),
    Quantize(r".*\.(b_proj|f_[ab]_proj)", 8, "decay and write strength: errors add up over the whole context"),
)


def published(spec: ModelSpec) -> tuple[Published, ...]:
    return absorbed_latents(spec)


def earlier(spec: ModelSpec) -> tuple[Published, ...]:
    return absorbed_latents(spec)  # mlx_lm did not split kv_b_proj at first, and quantized it whole


def spec(config: dict) -> ModelSpec:
    text = Config(config)
    text.only("hidden_act", "silu")
    for switch in ("mla_use_output_gate", "latent_moe_use_norm"):
        text.only(switch, False)
    for number in ("attn_res_block_size", "routed_expert_hidden_size"):
        text.only(number, None)
    linear = text.part("linear_attn_config")
    linear.only("use_full_rank_gate", False)
    linear.only("gate_lower_bound", None)
    return base_spec(config, text)


def base_spec(config: dict, text: Config) -> ModelSpec:
    """What Kimi-Linear and Kimi-K3 have in common."""
    text.only("mla_use_nope", True)
    text.only("attention_bias", False)
    linear = text.part("linear_attn_config")
    eps = text.number("rms_norm_eps", 1e-5)
    head_dim = linear.integer("head_dim")
    kda = KdaSpec(
        key_heads=linear.integer("num_heads"),
        value_heads=linear.integer("num_heads"),
        key_dim=head_dim,
        value_dim=head_dim,
        conv_width=linear.integer("short_conv_kernel_size", 4),
        norm_eps=eps,
        decay_rank=head_dim,
        gate_rank=head_dim,
    )
    mla = MlaSpec(
        heads=text.integer("num_attention_heads"),
        rank=text.integer("kv_lora_rank"),
        nope_dim=text.integer("qk_nope_head_dim"),
        rope_dim=text.integer("qk_rope_head_dim"),
        value_dim=text.integer("v_head_dim"),
        rope=None,
        norm_eps=1e-6,  # of the class, whatever rms_norm_eps says
        query_rank=text.integer("q_lora_rank", 0) or None,
    )
    kinds = _kinds(linear, text)
    return ModelSpec(
        model_type=config["model_type"],
        vocab_size=text.integer("vocab_size"),
        hidden_size=text.integer("hidden_size"),
        layers=tuple(LayerSpec({"kda": kda, "full": mla}[kind], _mlp(text, i)) for i, kind in enumerate(kinds)),
        norm_eps=eps,
        tied=text.only("tie_word_embeddings", False, True),
        max_positions=text.integer("model_max_length", text.integer("max_position_embeddings", 1048576)),
    )


def _kinds(linear: Config, text: Config) -> list[str]:
    """Each layer's kind; the two lists of config.json count layers from 1."""
    count = text.integer("num_hidden_layers")
    full, kda = linear.get("full_attn_layers"), linear.get("kda_layers")
    if sorted([*full, *kda]) != list(range(1, count + 1)):
        raise CheckpointError(
            f"config.json: kda_layers and full_attn_layers of linear_attn_config do not name each layer from 1 to {count} once"
        )
    return ["full" if i + 1 in full else "kda" for i in range(count)]


def _mlp(text: Config, index: int) -> MlpSpec | MoeSpec:
    experts = text.integer("num_experts", text.integer("num_local_experts", 0))
    dense = dense_mlp(text, index, text.integer("first_k_dense_replace", 0))
    if not experts or dense or index % max(text.integer("moe_layer_freq", 1), 1):
        return MlpSpec(text.integer("intermediate_size"))
    size = text.integer("moe_intermediate_size")
    return MoeSpec(
        experts=experts,
        top_k=text.integer("num_experts_per_token", text.get("num_experts_per_tok", None)),
        size=size,
        shared_size=size * text.integer("num_shared_experts", text.integer("n_shared_experts", 0)),
        router=text.only("moe_router_activation_func", "sigmoid", "softmax"),
        renormalize=text.only("moe_renormalize", True, False),
        scaling=text.number("routed_scaling_factor", 1.0),
        correction_bias=True,
        groups=text.integer("num_expert_group", 1),
        top_groups=text.integer("topk_group", 1),
    )


def names(spec: ModelSpec) -> Iterator[tuple[str, str | Take]]:
    """Parameter (or the module it lies in) -> its place in MLX layout."""
    yield "embed", "model.embed_tokens"
    yield "norm", "model.norm"
    yield "head", "lm_head"
    for i, layer in enumerate(spec.layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        yield f"{ours}.mixer_norm", f"{theirs}.input_layernorm"
        yield f"{ours}.mlp_norm", f"{theirs}.post_attention_layernorm"
        yield f"{ours}.mlp", f"{theirs}.mlp"
        yield f"{ours}.mixer", f"{theirs}.self_attn"
        if isinstance(layer.mlp, MoeSpec):
            yield from moe_names(f"{ours}.mlp", f"{theirs}.mlp", "e_score_correction_bias")
        if isinstance(layer.mixer, KdaSpec):
            yield from kda_names(layer.mixer, f"{ours}.mixer", f"{theirs}.self_attn", "{}_conv.conv")
