"""MiniMax-Text-01 and MiniMax-M1: seven layers of Lightning attention, then one of softmax attention, all with experts.

References: MiniMax's own modelling code (``minimax_text_01``, ``minimax_m1``) and transformers' MiniMaxForCausalLM
(``minimax``), which are one model in two spellings of the config. The norms come before each sub-layer, and what they
give is also what is carried on: x <- alpha norm(x) + beta f(norm(x)).

Rotary positions follow the config: the first ``rotary_dim`` features of a head, all of them where the key is absent.
MiniMax's code reads that key, and the published models were trained with 64 of 128. transformers' class ignores it and
turns whole heads, even for published configs that hold ``rotary_dim: 64``; for those we do what the weights were
trained with.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import CheckpointError, UnsupportedModelError
from ..layout import Quantize, Take
from ..spec import AttentionSpec, LayerSpec, LightningSpec, ModelSpec, MoeSpec, ResidualSpec, RopeSpec
from .common import stacked_experts
from .config import Config
from .lightning_decay import decays

MODEL_TYPES = ("minimax_text_01", "minimax_m1", "minimax")
# Stock mlx_lm has no loader for these models. Its "minimax" is MiniMax-M2, another architecture, so a converted model
# takes the original spelling, which stock mlx_lm refuses as unknown instead of building the wrong model.
MLX_TYPES = {"minimax": "minimax_text_01"}
MLX_PREFIX = ""
PREFIXES = ()


PUBLISHED = stacked_experts()
DROPPED = (
    (
        r".*\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)",
        "constant decays, which follow from the architecture",
    ),
)
QUANTIZE = (Quantize(r".*\.block_sparse_moe\.gate", 8, "router: a rounded score chooses another expert"),)

NORM_EPS = 1e-6  # of the Lightning output norm: both modelling codes take their class's default and not rms_norm_eps


def spec(config: dict) -> ModelSpec:
    text = Config(config)
    if "MiniMaxM2ForCausalLM" in (config.get("architectures") or []):
        raise UnsupportedModelError(
            "config.json: architectures names MiniMaxM2ForCausalLM, a model without linear attention that shares its "
            "model_type 'minimax' with MiniMax-Text-01; use mlx_lm for it"
        )
    text.only("hidden_act", "silu")
    text.only("postnorm", True)
    text.only("shared_intermediate_size", 0)
    text.only("sliding_window", None)
    hidden, heads = text.integer("hidden_size"), text.integer("num_attention_heads")
    head_dim = text.integer("head_dim", hidden // heads)
    eps = text.number("rms_norm_eps", 1e-5)
    rope = text.rope(head_dim, theta=1e6, partial=1.0)
    attention = AttentionSpec(
        heads=heads,
        kv_heads=text.integer("num_key_value_heads"),
        head_dim=head_dim,
        rope=RopeSpec(text.integer("rotary_dim", rope.dims), rope.theta),
        norm_eps=eps,
    )
    moe = MoeSpec(
        experts=text.integer("num_local_experts"),
        top_k=text.integer("num_experts_per_tok"),
        size=text.integer("intermediate_size"),
        shared_size=0,
    )
    linear, full, mlp = (_residual(text, part) for part in ("linear_attention", "full_attention", "mlp"))
    kinds = _kinds(text)

    def layer(index: int, kind: str) -> LayerSpec:
        if kind == "full_attention":
            return LayerSpec(attention, moe, full, mlp)
        factor = 1 - index / (len(kinds) - 1 + 1e-5) + 1e-5
        lightning = LightningSpec(heads, head_dim, decays(heads, factor), scale=1.0, norm_eps=NORM_EPS, silu=True)
        return LayerSpec(lightning, moe, linear, mlp)

    return ModelSpec(
        model_type=config["model_type"],
        vocab_size=text.integer("vocab_size"),
        hidden_size=hidden,
        layers=tuple(layer(i, kind) for i, kind in enumerate(kinds)),
        norm_eps=eps,
        tied=text.only("tie_word_embeddings", False, True),
        max_positions=text.integer("max_position_embeddings"),
    )


def _kinds(text: Config) -> list[str]:
    """Each layer's kind, in either spelling."""
    numbers = text.get("attn_type_list", None)
    if numbers is None:
        text.get("layer_types")  # no interval stands in for it
        return text.layer_types("linear_attention", "full_attention")
    if set(numbers) - {0, 1} or len(numbers) != text.integer("num_hidden_layers"):
        raise CheckpointError(
            f"config.json: attn_type_list is {numbers!r}, expected num_hidden_layers times 0 (Lightning) or 1 (softmax)"
        )
    return ["full_attention" if number else "linear_attention" for number in numbers]


def _residual(text: Config, part: str) -> ResidualSpec:
    """alpha and beta of one kind of sub-layer, in either spelling; 1 where the config has neither."""
    short = part.replace("attention", "attn")
    alpha, beta = (
        text.number(f"layernorm_{part}_{name}", text.number(f"{short}_{name}_factor", 1.0))
        for name in ("alpha", "beta")
    )
    return ResidualSpec("carried", alpha, beta)


def names(spec: ModelSpec) -> Iterator[tuple[str, str | Take]]:
    """Parameter (or the module it lies in) -> its place in MLX layout."""
    yield "embed", "model.embed_tokens"
    yield "norm", "model.norm"
    yield "head", "lm_head"
    for i, layer in enumerate(spec.layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        yield f"{ours}.mixer_norm", f"{theirs}.input_layernorm"
        yield f"{ours}.mlp_norm", f"{theirs}.post_attention_layernorm"
        yield f"{ours}.mlp", f"{theirs}.block_sparse_moe"
        yield f"{ours}.mixer", f"{theirs}.self_attn"
        if isinstance(layer.mixer, LightningSpec):
            heads, D = layer.mixer.heads, layer.mixer.head_dim
            yield (
                f"{ours}.mixer.qkv_proj",  # stored head by head, [q | k | v] of each
                Take(f"{theirs}.self_attn.qkv_proj", ("ungroup", heads, (D, D, D), (0, 1, 2))),
            )
            yield f"{ours}.mixer.g_proj", f"{theirs}.self_attn.output_gate"
            yield f"{ours}.mixer.norm_weight", f"{theirs}.self_attn.norm.weight"
