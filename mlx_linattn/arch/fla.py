"""The research models of flash-linear-attention: one frame, seven mixers, each optionally mixed with softmax attention.

    gated_deltanet, delta_net, kda          delta rules
    linear_attn, retnet, gla, hgrn2         without a delta rule

Reference: fla.models of flash-linear-attention 0.6. Configs may lack keys that were added after they were written; then
the classes' defaults hold.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import CheckpointError
from ..layout import Published, Quantize, Take
from ..spec import (
    AttentionSpec,
    GatedDeltaSpec,
    KdaSpec,
    KeyDecay,
    LayerSpec,
    LinearAttentionSpec,
    LowRankDecay,
    MlpSpec,
    ModelSpec,
    RopeSpec,
)
from .config import Config

# Stock mlx_lm has no loader for any of them: MLX layout is the published names, with convolutions as [C, K, 1].
MLX_TYPES: dict[str, str] = {}
MLX_PREFIX = ""
PREFIXES = ()

GATE, UP = "{1}.mlp.gate_proj.weight", "{1}.mlp.up_proj.weight"
PUBLISHED = (
    Published(r".*\.[qkv]_conv1d\.weight", Take("{0}", ("move_axis", 2, 1))),
    # Until February 2025 gate_proj held the gate's rows and then up_proj's.
    Published(r"(.*)\.mlp\.gate_proj\.weight", Take(GATE, given=UP), Take(GATE, ("part", 0, 0, 2))),
    Published(r"(.*)\.mlp\.up_proj\.weight", Take(UP), Take(GATE, ("part", 0, 1, 2))),
    # fuse_norm false changes the norm's name and nothing else
    Published(r"(.*)\.g_norm_swish_gate\.weight", Take("{0}"), Take("{1}.g_norm.weight")),
)
DROPPED = ((r".*\.attn\.D", "skip weights of early Gated DeltaNet files, which that code never read"),)
QUANTIZE = (
    Quantize(r".*\.[qkv]_conv1d", None, "short convolution: few numbers, all of the recurrence passes through them"),
    Quantize(r".*\.feature_map_[qk]\..*", None, "feature map: few numbers, shared by all heads"),
    Quantize(
        r".*\.attn\.([abf]_proj|(f|gk)_proj\.[01])", 8, "decay and write strength: errors add up over the context"
    ),
)

# Switches with one value that the layers here compute; anything else in a config is refused.
CONVOLUTION = {"use_short_conv": (True,)}
PLAIN = {"use_short_conv": (False,), "elementwise_affine": (True,)}
SWITCHES = {
    "gated_deltanet": CONVOLUTION | {"use_mamba_gate": (True,)},
    "delta_net": CONVOLUTION | {"use_beta": (True,), "qk_norm": ("l2",), "qk_activation": ("silu",), "use_output_norm": (True,)},
    "kda": CONVOLUTION,
    "linear_attn": PLAIN | dict.fromkeys(("tie_feature_map_qk", "norm_q", "norm_k"), (False,)),
    "retnet": PLAIN | {"feature_map": (None,)},
    "gla": PLAIN | {"use_gk": (True,), "use_gv": (False,)},
    "hgrn2": PLAIN,
}  # fmt: skip


def spec(config: dict) -> ModelSpec:
    text, kind = Config(config), config["model_type"]
    for key, allowed in {"hidden_act": ("swish", "silu"), "attnres_block_size": (None,), **SWITCHES[kind]}.items():
        text.only(key, *allowed)
    hidden = text.integer("hidden_size")
    inner = hidden * text.integer("hidden_ratio", 2 if kind == "retnet" else 4) * 2 // 3
    mlp = MlpSpec(text.integer("intermediate_size", -(-inner // 256) * 256))
    mixer, attention = MIXERS[kind](text), _attention(text)
    return ModelSpec(
        model_type=kind,
        vocab_size=text.integer("vocab_size"),
        hidden_size=hidden,
        layers=tuple(LayerSpec(attention.get(i, mixer), mlp) for i in range(text.integer("num_hidden_layers"))),
        norm_eps=text.number("norm_eps", 1e-6),
        tied=text.only("tie_word_embeddings", False, True),
        max_positions=text.integer("max_position_embeddings", 2048),
    )


def _attention(text: Config) -> dict[int, AttentionSpec]:
    """The layers of softmax attention: ``attn`` is one description of some layers, or a list of them."""
    found = text.get("attn", [])
    layers: dict[int, AttentionSpec] = {}
    for part in map(Config, found if isinstance(found, list) else [found]):
        heads, hidden = part.integer("num_heads"), text.integer("hidden_size")
        part.only("qkv_bias", False)
        part.only("qk_norm", False)
        rope = RopeSpec(hidden // heads, part.number("rope_theta", 1e4))
        kv_heads, window = part.integer("num_kv_heads", heads), part.get("window_size", None)
        layers |= dict.fromkeys(
            part.get("layers"), AttentionSpec(heads, kv_heads, hidden // heads, rope, norm_eps=0.0, window=window)
        )
    return layers


def _head_dim(text: Config, expand: str, default: float) -> int:
    """Width of one head, where all heads together are ``expand`` times hidden_size wide."""
    hidden, heads = text.integer("hidden_size"), text.integer("num_heads")
    width = text.number(expand, default) * hidden / heads
    if not width.is_integer():
        raise CheckpointError(f"config.json: {expand} times hidden_size {hidden} does not divide into {heads} heads")
    return int(width)


def _heads(text: Config) -> dict[str, int | float]:
    """Heads of the delta rules with head_dim; a value head is expand_v times as wide."""
    heads, key_dim, eps = text.integer("num_heads"), text.integer("head_dim"), text.number("norm_eps", 1e-6)
    value_dim = int(key_dim * text.number("expand_v"))
    return {"key_heads": heads, "value_heads": text.integer("num_v_heads", heads), "key_dim": key_dim, "value_dim": value_dim,
            "conv_width": text.integer("conv_size", 4), "norm_eps": eps, "beta_scale": _beta_scale(text)}  # fmt: skip


def _beta_scale(text: Config) -> float:
    return 2.0 if text.only("allow_neg_eigval", False, True) else 1.0


def _gated_deltanet(text: Config) -> GatedDeltaSpec:
    gate = {"swish": "silu", "silu": "silu", "sigmoid": "sigmoid"}
    activation = gate[text.only("output_gate_activation", *gate)]
    has_gate = text.only("use_gate", True, False)
    return GatedDeltaSpec(**_heads(text), output_gate=activation if has_gate else None, separate_qkv=True)


def _delta_net(text: Config) -> GatedDeltaSpec:
    heads = text.integer("num_heads")
    return GatedDeltaSpec(
        key_heads=heads,
        value_heads=heads,
        key_dim=_head_dim(text, "expand_k", 1.0),
        value_dim=_head_dim(text, "expand_v", 1.0),
        conv_width=text.integer("conv_size", 4),
        norm_eps=text.number("norm_eps", 1e-6),
        beta_scale=_beta_scale(text),
        decay=False,
        output_gate="silu" if text.only("use_gate", False, True) else None,
        separate_qkv=True,
    )


def _kda(text: Config) -> KdaSpec:
    heads, bound = _heads(text), text.get("lower_bound", None)
    rank = heads["value_dim"]
    return KdaSpec(**heads, decay_rank=rank, gate_rank=rank, gate_bias=True, lower_bound=bound)


def _linear(text: Config, expand_k: float, expand_v: float, **words) -> LinearAttentionSpec:
    heads = text.integer("num_heads")
    return LinearAttentionSpec(
        heads=heads,
        kv_heads=text.integer("num_kv_heads", heads),
        key_dim=_head_dim(text, "expand_k", expand_k),
        value_dim=_head_dim(text, "expand_v", expand_v),
        norm_eps=text.number("norm_eps", 1e-6),
        **words,
    )


def _gate(text: Config) -> str | None:
    return "silu" if text.only("use_output_gate", True, False) else None


def _linear_attn(text: Config) -> LinearAttentionSpec:
    maps = ("elementwise_product", "t2r", "hedgehog", "elu", "relu", "identity")
    normalize = text.only("norm_feature_map", False, True)
    return _linear(text, 1.0, 1.0, feature_map=text.only("feature_map", *maps), normalize=normalize)


def _retnet(text: Config) -> LinearAttentionSpec:
    decay = tuple(1 - 2.0 ** (-5 - head) for head in range(text.integer("num_heads")))
    rope = RopeSpec(_head_dim(text, "expand_k", 1.0), 1e4)
    return _linear(text, 1.0, 2.0, decay=decay, rope=rope, output_gate=_gate(text))


def _gla(text: Config) -> LinearAttentionSpec:
    maps = {None: "identity", "relu": "relu", "swish": "silu", "silu": "silu"}
    minimum = text.get("clamp_min", None)
    return _linear(
        text,
        0.5,
        1.0,
        decay=LowRankDecay(rank=16, normalizer=16.0, log_minimum=minimum),
        feature_map=maps[text.only("feature_map", *maps)],
        output_gate=_gate(text),
    )


def _hgrn2(text: Config) -> LinearAttentionSpec:
    hidden = text.integer("hidden_size")
    key_dim = text.integer("expand_ratio", 0) or hidden // text.integer("num_heads")
    heads = hidden // key_dim
    return LinearAttentionSpec(
        heads=heads,
        kv_heads=heads,
        key_dim=key_dim,
        value_dim=hidden // heads,
        norm_eps=1e-5,  # of the fused norm's default, whatever norm_eps says
        decay=KeyDecay(bounded=text.only("use_lower_bound", True, False)),
        feature_map="silu",
        norm_whole=True,
    )


MIXERS = {
    "gated_deltanet": _gated_deltanet,
    "delta_net": _delta_net,
    "kda": _kda,
    "linear_attn": _linear_attn,
    "retnet": _retnet,
    "gla": _gla,
    "hgrn2": _hgrn2,
}
MODEL_TYPES = tuple(MIXERS)


def names(spec: ModelSpec) -> Iterator[tuple[str, str | Take]]:
    """Parameter (or the module it lies in) -> its place in MLX layout."""
    yield "embed", "model.embeddings"
    yield "norm", "model.norm"
    yield "head", "lm_head"
    for i, layer in enumerate(spec.layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        yield f"{ours}.mixer_norm", f"{theirs}.attn_norm"
        yield f"{ours}.mlp_norm", f"{theirs}.mlp_norm"
        yield f"{ours}.mlp", f"{theirs}.mlp"
        yield f"{ours}.mixer", f"{theirs}.attn"
        mixer, place = f"{ours}.mixer", f"{theirs}.attn"
        if isinstance(layer.mixer, (GatedDeltaSpec, KdaSpec)):
            convolutions = tuple(f"{place}.{x}_conv1d.weight" for x in "qkv")
            yield f"{mixer}.conv_weight", Take(convolutions, ("concat",), ("squeeze", 2))
            yield f"{mixer}.norm_weight", f"{place}.o_norm.weight"
        if isinstance(layer.mixer, GatedDeltaSpec):
            for name, published in (("in_proj_a", "a"), ("in_proj_b", "b"), ("in_proj_z", "g"), ("out_proj", "o")):
                yield f"{mixer}.{name}", f"{place}.{published}_proj"
        elif isinstance(layer.mixer, KdaSpec):
            for gate in ("f_proj", "g_proj"):
                yield f"{mixer}.{gate}.down", f"{place}.{gate}.0"
                yield f"{mixer}.{gate}.up", f"{place}.{gate}.1"
        elif isinstance(layer.mixer, LinearAttentionSpec):
            yield f"{mixer}.norm_weight", f"{place}.{_norm_name(layer.mixer)}.weight"
            yield f"{mixer}.decay_down", f"{place}.gk_proj.0"
            yield f"{mixer}.decay_up", f"{place}.gk_proj.1"
            if isinstance(layer.mixer.decay, KeyDecay):
                yield f"{mixer}.v_proj", f"{place}.i_proj"
                yield f"{mixer}.decay_bound", Take("model.lower_bounds", ("rising_share", i))


def _norm_name(mixer: LinearAttentionSpec) -> str:
    if mixer.decay is None:
        return "norm"
    return "g_norm_swish_gate" if mixer.output_gate else "g_norm"
