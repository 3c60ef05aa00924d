"""Jamba, dense and mixture of experts: Mamba-1 layers, every few layers attention without positions.

Reference: transformers' JambaForCausalLM. The weights of the chosen experts are their shares of the softmax over all
experts, as they are (vLLM does the same). Stock mlx_lm reads the result but divides them by their sum, so its logits of
the mixtures are not the reference's; those of the dense models are.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import CheckpointError
from ..layout import Published, Quantize, Take
from ..spec import AttentionSpec, LayerSpec, MambaSpec, MlpSpec, ModelSpec, MoeSpec
from .common import stacked_experts
from .config import Config
from .mamba import mamba_names, step_rank

MODEL_TYPES = ("jamba",)
MLX_TYPES: dict[str, str] = {}  # stock mlx_lm knows this one by its own name
MLX_PREFIX = ""
PREFIXES = ()
PUBLISHED = (
    Published(r".*\.conv1d\.weight", Take("{0}", ("move_axis", 2, 1))),
    *stacked_experts(),
)
DROPPED = ((r"lm_head\.weight", "a copy of the embedding, which is the output head"),)
QUANTIZE = (
    Quantize(r".*\.conv1d", None, "short convolution: few numbers, all of the recurrence passes through them"),
    Quantize(r".*\.feed_forward\.router", 8, "router: a rounded score chooses another expert"),
    Quantize(r".*\.mamba\.(x_proj|dt_proj)", 8, "step sizes and gates: errors add up over the whole context"),
)


def spec(config: dict) -> ModelSpec:
    text = Config(config)
    text.only("hidden_act", "silu")
    text.only("sliding_window", None)
    text.only("mamba_inner_layernorms", True)
    hidden, heads = text.integer("hidden_size"), text.integer("num_attention_heads")
    eps = text.number("rms_norm_eps", 1e-6)
    mixers = {
        "mamba": MambaSpec(
            inner=text.integer("mamba_expand", 2) * hidden,
            state_size=text.integer("mamba_d_state", 16),
            step_rank=step_rank(text, "mamba_dt_rank"),
            conv_width=text.integer("mamba_d_conv", 4),
            conv_bias=text.only("mamba_conv_bias", True, False),
            bias=text.only("mamba_proj_bias", False, True),
            step_norm="weighted",
            norm_eps=eps,
        ),
        "attention": AttentionSpec(
            heads=heads,
            kv_heads=text.integer("num_key_value_heads", heads),
            head_dim=hidden // heads,
            rope=None,
            norm_eps=eps,
        ),
    }
    return ModelSpec(
        model_type=config["model_type"],
        vocab_size=text.integer("vocab_size"),
        hidden_size=hidden,
        layers=tuple(LayerSpec(mixers[kind], _mlp(text, i)) for i, kind in enumerate(_kinds(text, mixers))),
        norm_eps=eps,
        tied=text.only("tie_word_embeddings", False, True),
        max_positions=text.integer("max_position_embeddings", 262144),
    )


def _kinds(text: Config, known) -> list[str]:
    """Each layer's kind: listed in newer files, else one attention layer a period."""
    count = text.integer("num_hidden_layers")
    kinds = text.get("layers_block_type", None)
    if kinds is None:
        period, offset = text.integer("attn_layer_period", 8), text.integer("attn_layer_offset", 4)
        return ["attention" if i % max(period, 1) == offset else "mamba" for i in range(count)]
    if len(kinds) != count or not set(kinds) <= set(known):
        raise CheckpointError(
            f"config.json: layers_block_type is {kinds!r}, expected num_hidden_layers times 'mamba' or 'attention'"
        )
    return kinds


def _mlp(text: Config, index: int) -> MlpSpec | MoeSpec:
    experts, size = text.integer("num_experts", 16), text.integer("intermediate_size")
    period, offset = text.integer("expert_layer_period", 2), text.integer("expert_layer_offset", 1)
    if experts < 2 or index % max(period, 1) != offset:
        return MlpSpec(size)
    return MoeSpec(experts, text.integer("num_experts_per_tok", 2), size, shared_size=0, renormalize=False)


def names(spec: ModelSpec) -> Iterator[tuple[str, str | Take]]:
    """Parameter (or the module it lies in) -> its place in MLX layout."""
    yield "embed", "model.embed_tokens"
    yield "norm", "model.final_layernorm"
    yield "head", "lm_head"
    for i, layer in enumerate(spec.layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        yield f"{ours}.mixer_norm", f"{theirs}.input_layernorm"
        yield f"{ours}.mlp_norm", f"{theirs}.pre_ff_layernorm"
        yield f"{ours}.mlp", f"{theirs}.feed_forward"
        yield f"{ours}.mlp.gate", f"{theirs}.feed_forward.router"
        if isinstance(layer.mixer, MambaSpec):
            yield from mamba_names(f"{ours}.mixer", f"{theirs}.mamba")
        else:
            yield f"{ours}.mixer", f"{theirs}.self_attn"
