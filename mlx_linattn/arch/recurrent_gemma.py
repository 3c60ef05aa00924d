"""RecurrentGemma (Griffin): two recurrent blocks with an RG-LRU, then one of attention over a short window.

Reference: transformers' RecurrentGemmaForCausalLM. Stock mlx_lm reads the result, but its logits differ a little: it
multiplies embeddings by sqrt(hidden_size), where the reference rounds that number to bfloat16 (50.5 and not 50.596 for
the 2B), and it norms with an eps of 1e-5 whatever ``rms_norm_eps`` says.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from ..errors import CheckpointError
from ..layout import Published, Quantize, Take
from ..spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, RgLruSpec
from .config import Config

MODEL_TYPES = ("recurrent_gemma",)
MLX_TYPES: dict[str, str] = {}  # stock mlx_lm knows this one by its own name
MLX_PREFIX = ""
PREFIXES = ()
PUBLISHED = (Published(r".*\.conv_1d\.weight", Take("{0}", ("move_axis", 2, 1))),)
DROPPED = ((r"lm_head\.weight", "a copy of the embedding, which is the output head"),)
QUANTIZE = (
    Quantize(r".*\.conv_1d", None, "short convolution: few numbers, all of the recurrence passes through them"),
)


def spec(config: dict) -> ModelSpec:
    text = Config(config)
    text.only("hidden_activation", "gelu_pytorch_tanh")
    text.only("tie_word_embeddings", True)
    hidden, heads = text.integer("hidden_size"), text.integer("num_attention_heads")
    head_dim = text.integer("head_dim", hidden // heads)
    eps = text.number("rms_norm_eps", 1e-6)
    mixers = {
        "recurrent": RgLruSpec(
            width=text.integer("lru_width", hidden), heads=heads, conv_width=text.integer("conv1d_width", 4)
        ),
        "attention": AttentionSpec(
            heads=heads,
            kv_heads=text.integer("num_key_value_heads", heads),
            head_dim=head_dim,
            rope=text.rope(head_dim, theta=1e4, partial=0.5),
            norm_eps=eps,
            bias=text.only("attention_bias", False, True),
            output_bias=True,
            window=text.integer("attention_window_size", 2048),
        ),
    }
    mlp = MlpSpec(text.integer("intermediate_size") // 2, activation="gelu_tanh", bias=True)  # stored as gate + up
    cap = text.number("logits_soft_cap", 30.0)
    scaled = text.only("embeddings_scale_by_sqrt_dim", True, False)  # absent from the 9B's config
    return ModelSpec(
        model_type=config["model_type"],
        vocab_size=text.integer("vocab_size"),
        hidden_size=hidden,
        layers=tuple(LayerSpec(mixers[kind], mlp) for kind in _kinds(text, mixers)),
        norm_eps=eps,
        tied=True,
        # The config names no limit. Neither half of the model has one: the RG-LRU forgets, and attention sees a window.
        max_positions=text.integer("max_position_embeddings", 1 << 20),
        embedding_scale=bfloat16(hidden**0.5) if scaled else 1.0,
        logit_softcap=cap or None,
    )


def _kinds(text: Config, known) -> list[str]:
    """Each layer's kind: the pattern repeats. Some published files spell its key with an underscore in front."""
    pattern = text.get("block_types", text.get("_block_types", ["recurrent", "recurrent", "attention"]))
    unknown = [kind for kind in pattern if kind not in known]
    if unknown or not pattern:
        raise CheckpointError(
            f"config.json: block_types is {pattern!r}, but only a list of {' and '.join(map(repr, known))} is supported"
        )
    return [pattern[i % len(pattern)] for i in range(text.integer("num_hidden_layers"))]


def bfloat16(number: float) -> float:
    """The nearest bfloat16, ties to even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", number))
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def names(spec: ModelSpec) -> Iterator[tuple[str, str | Take]]:
    """Parameter (or the module it lies in) -> its place in MLX layout."""
    one = ("add", 1.0)  # stock mlx_lm leaves these norms zero-centred on disk and adds 1 as it runs
    yield "embed", "model.embed_tokens"
    yield "norm.weight", Take("model.final_norm.weight", one)
    for i, layer in enumerate(spec.layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        yield f"{ours}.mixer_norm.weight", Take(f"{theirs}.temporal_pre_norm.weight", one)
        yield f"{ours}.mlp_norm.weight", Take(f"{theirs}.channel_pre_norm.weight", one)
        yield f"{ours}.mlp", f"{theirs}.mlp_block"
        yield f"{ours}.mixer", f"{theirs}.temporal_block"
        if isinstance(layer.mixer, RgLruSpec):
            block = f"{theirs}.temporal_block"
            yield f"{ours}.mixer.conv_weight", Take(f"{block}.conv_1d.weight", ("squeeze", 2))
            yield f"{ours}.mixer.conv_bias", f"{block}.conv_1d.bias"
            for part in (
                "recurrent_param",
                *(f"{g}_gate_{p}" for g in ("input", "recurrent") for p in ("weight", "bias")),
            ):
                yield f"{ours}.mixer.{part}", f"{block}.rg_lru.{part}"
