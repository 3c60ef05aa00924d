"""Ring-mini-linear-2.0 and Ring-flash-linear-2.0: Lightning attention, every few layers grouped-query attention, experts.

References: the published modelling code (BailingMoeLinearV2ForCausalLM) and mlx_lm's bailing_moe_linear. They disagree
on the layer index of the decays (``lightning_decay``); the default here is mlx_lm's.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..layout import Published, Quantize, Take
from ..spec import AttentionSpec, LayerSpec, LightningSpec, MlpSpec, ModelSpec, MoeSpec
from .common import moe_names, stacked_experts
from .config import Config
from .lightning_decay import ling_decay

MODEL_TYPES = ("bailing_moe_linear",)
MLX_TYPES: dict[str, str] = {}  # stock mlx_lm knows this one by its own name
MLX_PREFIX = ""
PREFIXES = ()

PUBLISHED = (
    Published(r"(.*)\.mlp\.gate\.gate_proj\.(weight|bias)", Take("{1}.mlp.gate.{2}")),
    *stacked_experts(),
)
DROPPED: tuple[tuple[str, str], ...] = ()
QUANTIZE = (Quantize(r".*\.mlp\.gate\.gate_proj", 8, "router: a rounded score chooses another expert"),)

DECAY_LAYER = "previous_from_zero"


def spec(config: dict) -> ModelSpec:
    text = Config(config)
    hidden, heads = text.integer("hidden_size"), text.integer("num_attention_heads")
    head_dim = text.integer("head_dim", hidden // heads)
    text.only("use_bias", False)
    text.only("norm_head", False)
    text.only("norm_softmax", False)
    attention = AttentionSpec(
        heads=heads,
        kv_heads=text.integer("num_key_value_heads"),
        head_dim=head_dim,
        rope=text.rope(head_dim, theta=1e6, partial=1.0),
        norm_eps=text.number("rms_norm_eps"),
        qk_norm=text.only("use_qk_norm", False, True),
        bias=text.only("use_qkv_bias", False),
    )
    return model_spec(config, DECAY_LAYER, attention)


def model_spec(config: dict, decay_layer: str, attention) -> ModelSpec:
    """The model around a release's softmax attention; Ling-2.5's differs."""
    text = Config(config)
    text.only("hidden_act", "silu")
    eps = text.number("rms_norm_eps")
    count, group = text.integer("num_hidden_layers"), max(text.integer("layer_group_size"), 1)

    def layer(index: int) -> LayerSpec:
        # the last layer of each group, and all layers that no longer fill one
        full = (index + 1) % group == 0 or index >= count // group * group
        return LayerSpec(attention if full else _lightning(text, index, decay_layer), _mlp(text, index))

    return ModelSpec(
        model_type=config["model_type"],
        vocab_size=text.integer("vocab_size"),
        hidden_size=text.integer("hidden_size"),
        layers=tuple(layer(i) for i in range(count)),
        norm_eps=eps,
        tied=text.only("tie_word_embeddings", False, True),
        max_positions=text.integer("max_position_embeddings"),
    )


def _lightning(text: Config, index: int, decay_layer: str) -> LightningSpec:
    hidden, heads = text.integer("hidden_size"), text.integer("num_attention_heads")
    head_dim = text.integer("head_dim", hidden // heads)
    eps = text.number("rms_norm_eps")
    return LightningSpec(
        heads=heads,
        head_dim=head_dim,
        decay=ling_decay(text, index, decay_layer),
        scale=head_dim**-0.5,
        norm_eps=eps,
        norm_groups=text.integer("group_norm_size", 1),
        silu=text.only("linear_silu", False, True),
        qk_norm_eps=eps if text.only("use_qk_norm", False, True) else None,
        rope=text.rope(head_dim, theta=1e6, partial=1.0),
        bias=text.only("use_qkv_bias", False, True),
    )


def _mlp(text: Config, index: int) -> MlpSpec | MoeSpec:
    if index < text.integer("first_k_dense_replace", 0):
        return MlpSpec(text.integer("intermediate_size"))
    text.only("moe_router_enable_routed_scaling", True)
    size = text.integer("moe_intermediate_size")
    shared = text.integer("num_shared_experts") if text.only("moe_router_enable_shared_expert", True, False) else 0
    return MoeSpec(
        experts=text.integer("num_experts"),
        top_k=text.integer("num_experts_per_tok"),
        size=size,
        shared_size=shared * (text.integer("moe_shared_expert_intermediate_size", 0) or size),
        router=text.only("score_function", "softmax", "sigmoid"),
        renormalize=text.only("norm_topk_prob", True, False),
        scaling=text.number("routed_scaling_factor", 1.0),
        correction_bias=text.only("moe_router_enable_expert_bias", False, True),
        groups=text.integer("n_group", 1),
        top_groups=text.integer("topk_group", 1),
    )


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
            yield f"{ours}.mlp.gate", f"{theirs}.mlp.gate.gate_proj"
            yield from moe_names(f"{ours}.mlp", f"{theirs}.mlp", "gate.expert_bias")
        yield from _mixer_names(f"{ours}.mixer", f"{theirs}.attention", layer.mixer)


def _mixer_names(ours: str, theirs: str, mixer) -> Iterator[tuple[str, str | Take]]:
    yield f"{ours}.q_norm", f"{theirs}.query_layernorm"
    yield f"{ours}.k_norm", f"{theirs}.key_layernorm"
    if isinstance(mixer, LightningSpec):
        yield f"{ours}.qkv_proj", f"{theirs}.query_key_value"
        yield f"{ours}.g_proj", f"{theirs}.g_proj"
        yield f"{ours}.norm_weight", f"{theirs}.g_norm.weight"
        yield f"{ours}.out_proj", f"{theirs}.dense"
    if isinstance(mixer, AttentionSpec):
        rows = tuple(heads * mixer.head_dim for heads in (mixer.heads, mixer.kv_heads, mixer.kv_heads))
        for index, name in enumerate(("q_proj", "k_proj", "v_proj")):
            yield f"{ours}.{name}", Take(f"{theirs}.query_key_value", ("ungroup", 1, rows, (index,)))
        yield f"{ours}.o_proj", f"{theirs}.dense"
