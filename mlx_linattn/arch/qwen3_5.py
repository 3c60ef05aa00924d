"""Qwen3.5, 3.6 and 3.8, dense and mixture of experts: three Gated DeltaNet layers, then one of gated attention.

Reference: transformers' Qwen3_5ForConditionalGeneration and Qwen3_5MoeForConditionalGeneration. For text the rotary
sections of images (mrope) all count the same positions, which makes them one ordinary rotary embedding.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..layout import Published, Quantize, Take
from ..spec import AttentionSpec, GatedDeltaSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec
from .config import Config

MODEL_TYPES = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
MLX_TYPES = {"qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"}
MLX_PREFIX = "language_model."
PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)

ZERO_CENTRED = r"(.*\.(input_layernorm|post_attention_layernorm|[qk]_norm)|model\.norm)\.weight"
PUBLISHED = (
    Published(ZERO_CENTRED, Take("{0}", ("add", 1.0))),
    Published(r".*\.conv1d\.weight", Take("{0}", ("move_axis", 2, 1))),
    Published(
        r"(.*)\.switch_mlp\.gate_proj\.weight",
        Take("{1}.experts.gate_up_proj", ("part", -2, 0, 2)),
        Take("{1}.experts.{expert}.gate_proj.weight", ("stack",)),
    ),
    Published(
        r"(.*)\.switch_mlp\.up_proj\.weight",
        Take("{1}.experts.gate_up_proj", ("part", -2, 1, 2)),
        Take("{1}.experts.{expert}.up_proj.weight", ("stack",)),
    ),
    Published(
        r"(.*)\.switch_mlp\.down_proj\.weight",
        Take("{1}.experts.down_proj"),
        Take("{1}.experts.{expert}.down_proj.weight", ("stack",)),
    ),
)
DROPPED = (
    (r"mtp\..*", "multi-token-prediction head, which generation does not use"),
    (r"(model\.)?(visual|vision_tower)\..*", "vision tower, which a text model does not use"),
)
QUANTIZE = (
    Quantize(r".*\.conv1d", None, "short convolution: few numbers, all of the recurrence passes through them"),
    Quantize(r".*\.mlp\.(gate|shared_expert_gate)", 8, "router: a rounded score chooses another expert"),
    Quantize(r".*\.in_proj_(a|b|ba)", 8, "decay and write strength: errors add up over the whole context"),
)


def spec(config: dict) -> ModelSpec:
    text = Config(config)
    text.only("hidden_act", "silu")
    text.only("attn_output_gate", True)
    text.only("output_gate_type", "swish", "silu")
    hidden, heads = text.integer("hidden_size"), text.integer("num_attention_heads")
    head_dim = text.integer("head_dim", hidden // heads)
    eps = text.number("rms_norm_eps", 1e-6)
    mixers = {
        "linear_attention": GatedDeltaSpec(
            key_heads=text.integer("linear_num_key_heads"),
            value_heads=text.integer("linear_num_value_heads"),
            key_dim=text.integer("linear_key_head_dim"),
            value_dim=text.integer("linear_value_head_dim"),
            conv_width=text.integer("linear_conv_kernel_dim", 4),
            norm_eps=eps,
        ),
        "full_attention": AttentionSpec(
            heads=heads,
            kv_heads=text.integer("num_key_value_heads"),
            head_dim=head_dim,
            rope=text.rope(head_dim, theta=1e7, partial=0.25),
            norm_eps=eps,
            qk_norm=True,
            output_gate=True,
            bias=text.only("attention_bias", False, True),
        ),
    }
    kinds = text.layer_types("linear_attention", "full_attention")
    return ModelSpec(
        model_type=config["model_type"],
        vocab_size=text.integer("vocab_size"),
        hidden_size=hidden,
        layers=tuple(LayerSpec(mixers[kind], _mlp(text, i)) for i, kind in enumerate(kinds)),
        norm_eps=eps,
        tied=text.only("tie_word_embeddings", False, True),
        max_positions=text.integer("max_position_embeddings"),
    )


def _mlp(text: Config, index: int) -> MlpSpec | MoeSpec:
    experts = text.integer("num_experts", 0)
    step = text.integer("decoder_sparse_step", 1)
    if not experts or index in text.get("mlp_only_layers", []) or (index + 1) % max(step, 1):
        return MlpSpec(text.integer("intermediate_size"))
    return MoeSpec(
        experts=experts,
        top_k=text.integer("num_experts_per_tok"),
        size=text.integer("moe_intermediate_size"),
        shared_size=text.integer("shared_expert_intermediate_size"),
        renormalize=text.only("norm_topk_prob", True, False),
        shared_gate=True,
    )


def mlx_config(config: dict) -> dict | None:
    """The config with what stock mlx_lm reads instead of ``layer_types``, or None where no interval says the same."""
    kinds = Config(config).layer_types("linear_attention", "full_attention")
    interval = kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1
    if any((kind == "full_attention") != ((i + 1) % interval == 0) for i, kind in enumerate(kinds)):
        return None
    if "text_config" in config:
        return {**config, "text_config": {**config["text_config"], "full_attention_interval": interval}}
    return {**config, "full_attention_interval": interval}


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
        if isinstance(layer.mixer, GatedDeltaSpec):
            yield f"{ours}.mixer", f"{theirs}.linear_attn"
            yield f"{ours}.mixer.conv_weight", Take(f"{theirs}.linear_attn.conv1d.weight", ("squeeze", 2))
            yield f"{ours}.mixer.norm_weight", f"{theirs}.linear_attn.norm.weight"
        else:
            yield f"{ours}.mixer", f"{theirs}.self_attn"
