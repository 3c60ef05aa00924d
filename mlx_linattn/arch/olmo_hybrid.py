"""OLMo-Hybrid: three Gated DeltaNet layers whose beta reaches 2, then one of attention with its norms after the sub-layers.

Reference: transformers' OlmoHybridForCausalLM.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..layout import Published, Quantize, Take
from ..spec import AttentionSpec, GatedDeltaSpec, LayerSpec, MlpSpec, ModelSpec, ResidualSpec
from .config import Config

MODEL_TYPES = ("olmo_hybrid",)
MLX_TYPES: dict[str, str] = {}  # stock mlx_lm knows this one by its own name
MLX_PREFIX = ""
PREFIXES = ()

# The second ways are pre-release names, which transformers still writes.
PUBLISHED = (
    Published(r"(.*)\.input_layernorm\.weight", Take("{0}"), Take("{1}.attention_layer_norm.weight")),
    Published(r"(.*)\.post_attention_layernorm\.weight", Take("{0}"), Take("{1}.feedforward_layer_norm.weight")),
)
DROPPED = ()
QUANTIZE = (
    Quantize(r".*\.[qkv]_conv1d", None, "short convolution: few numbers, all of the recurrence passes through them"),
    Quantize(r".*\.linear_attn\.[ab]_proj", 8, "decay and write strength: errors add up over the whole context"),
)


def published(spec: ModelSpec) -> tuple[Published, ...]:
    """transformers cuts the joined convolution in three equal parts when it saves: join the parts and cut by the true widths."""
    mixer = next((layer.mixer for layer in spec.layers if isinstance(layer.mixer, GatedDeltaSpec)), None)
    if mixer is None:
        return ()
    keys = mixer.key_heads * mixer.key_dim
    edges = {"q": (0, keys), "k": (keys, 2 * keys), "v": (2 * keys, mixer.conv_channels)}
    parts = tuple(f"{{1}}.{x}_conv1d.weight" for x in "qkv")
    return tuple(
        Published(rf"(.*)\.{x}_conv1d\.weight", Take(parts, ("concat",), ("cut", 0, *edges[x]), ("move_axis", 2, 1)))
        for x in "qkv"
    )


def spec(config: dict) -> ModelSpec:
    text = Config(config)
    text.only("hidden_act", "silu")
    hidden, heads = text.integer("hidden_size"), text.integer("num_attention_heads")
    key_heads = text.integer("linear_num_key_heads", heads)
    key_dim = text.integer("linear_key_head_dim", int(0.75 * hidden / key_heads))
    head_dim = text.integer("head_dim", hidden // heads)
    eps = text.number("rms_norm_eps", 1e-6)
    linear = GatedDeltaSpec(
        key_heads=key_heads,
        value_heads=text.integer("linear_num_value_heads", heads),
        key_dim=key_dim,
        value_dim=text.integer("linear_value_head_dim", 2 * key_dim),
        conv_width=text.integer("linear_conv_kernel_dim", 4),
        norm_eps=1e-5,  # of the class, whatever rms_norm_eps says
        beta_scale=2.0 if text.only("linear_allow_neg_eigval", True, False) else 1.0,
        separate_qkv=True,
    )
    rotary = (text.get("rope_parameters", None) or {}).get("rope_theta") is not None
    attention = AttentionSpec(
        heads=heads,
        kv_heads=text.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        rope=text.rope(head_dim, theta=1e4, partial=1.0) if rotary else None,
        norm_eps=eps,
        qk_norm_full=True,
        bias=text.only("attention_bias", False, True),
    )
    mlp, after = MlpSpec(text.integer("intermediate_size")), ResidualSpec("after")
    layers = {
        "linear_attention": LayerSpec(linear, mlp),
        "full_attention": LayerSpec(attention, mlp, mixer_residual=after, mlp_residual=after),
    }
    return ModelSpec(
        model_type=config["model_type"],
        vocab_size=text.integer("vocab_size"),
        hidden_size=hidden,
        layers=tuple(layers[kind] for kind in text.layer_types("linear_attention", "full_attention")),
        norm_eps=eps,
        tied=text.only("tie_word_embeddings", False, True),
        max_positions=text.integer("max_position_embeddings", 65536),
    )


def names(spec: ModelSpec) -> Iterator[tuple[str, str | Take]]:
    """Parameter (or the module it lies in) -> its place in MLX layout."""
    yield "embed", "model.embed_tokens"
    yield "norm", "model.norm"
    yield "head", "lm_head"
    for i, layer in enumerate(spec.layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        yield f"{ours}.mlp", f"{theirs}.mlp"
        if not isinstance(layer.mixer, GatedDeltaSpec):
            yield f"{ours}.mixer", f"{theirs}.self_attn"
            yield f"{ours}.mixer_norm", f"{theirs}.post_attention_layernorm"
            yield f"{ours}.mlp_norm", f"{theirs}.post_feedforward_layernorm"
            continue
        yield f"{ours}.mixer_norm", f"{theirs}.input_layernorm"
        yield f"{ours}.mlp_norm", f"{theirs}.post_attention_layernorm"
        mixer, place = f"{ours}.mixer", f"{theirs}.linear_attn"
        yield mixer, place
        convolutions = tuple(f"{place}.{x}_conv1d.weight" for x in "qkv")
        yield f"{mixer}.conv_weight", Take(convolutions, ("concat",), ("squeeze", 2))
        yield f"{mixer}.norm_weight", f"{place}.o_norm.weight"
        yield f"{mixer}.in_proj_a", f"{place}.a_proj"
        yield f"{mixer}.in_proj_b", f"{place}.b_proj"
        yield f"{mixer}.in_proj_z", f"{place}.g_proj"
        yield f"{mixer}.out_proj", f"{place}.o_proj"
