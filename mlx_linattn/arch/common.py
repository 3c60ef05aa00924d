"""What the tables of several families have in common."""

from __future__ import annotations

from collections.abc import Iterator

from ..layout import Published, Take
from ..spec import KdaSpec, MlaSpec, ModelSpec
from .config import Config

MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def dense_mlp(text: Config, index: int, first: int) -> bool:
    """Whether a layer has one MLP instead of a mixture: by ``mlp_layer_types`` where present, else each before ``first``."""
    kinds = text.get("mlp_layer_types", None)
    return index < first if kinds is None else kinds[index] == "dense"


def stacked_experts(module: str = "(.*)", folder: str = "{1}.experts") -> tuple[Published, ...]:
    """Experts under ``switch_mlp``: published one by one, by either of two spellings, or packed with gate above up.

    ``module`` is the pattern of the module that holds ``switch_mlp``, ``folder`` the template of where its experts are.
    """
    rules = []
    for name, mixtral in MIXTRAL.items():
        if name == "down_proj":
            packed = Take(f"{folder}.down_proj")
        else:
            packed = Take(f"{folder}.gate_up_proj", ("part", -2, int(name == "up_proj"), 2))
        rules.append(
            Published(
                rf"{module}\.switch_mlp\.{name}\.weight",
                Take(f"{folder}.{{expert}}.{name}.weight", ("stack",)),
                Take(f"{folder}.{{expert}}.{mixtral}.weight", ("stack",)),
                packed,
            )
        )
    return tuple(rules)


def absorbed_latents(spec: ModelSpec) -> tuple[Published, ...]:
    """``embed_q`` and ``unembed_out`` of multi-head latent attention: published as kv_b_proj, whose rows are each head's keys and values."""
    mla = next((layer.mixer for layer in spec.layers if isinstance(layer.mixer, MlaSpec)), None)
    if mla is None:
        return ()
    keys, rows = mla.nope_dim, mla.nope_dim + mla.value_dim
    heads = ("reshape", mla.heads, rows, -1)
    embed_q = Take("{1}.kv_b_proj.weight", heads, ("cut", 1, 0, keys), ("move_axis", 2, 1))
    unembed_out = Take("{1}.kv_b_proj.weight", heads, ("cut", 1, keys, rows))
    return (
        Published(r"(.*)\.embed_q\.weight", Take("{0}"), embed_q),
        Published(r"(.*)\.unembed_out\.weight", Take("{0}"), unembed_out),
    )


def kda_names(spec: KdaSpec, ours: str, theirs: str, conv: str) -> Iterator[tuple[str, str | Take]]:
    """Places of a Kimi Delta Attention layer's parameters; ``conv`` is the convolution's name with a {} for q, k or v."""
    yield ours, theirs
    convolutions = tuple(f"{theirs}.{conv.format(x)}.weight" for x in "qkv")
    yield f"{ours}.conv_weight", Take(convolutions, ("concat",), ("squeeze", 2))
    yield f"{ours}.A_log", Take(f"{theirs}.A_log", ("reshape", -1))
    yield f"{ours}.dt_bias", Take(f"{theirs}.dt_bias", ("reshape", -1))
    yield f"{ours}.norm_weight", f"{theirs}.o_norm.weight"
    for gate, rank in (("f", spec.decay_rank), ("g", spec.gate_rank)):
        if rank is not None:
            yield f"{ours}.{gate}_proj.down", f"{theirs}.{gate}_a_proj"
            yield f"{ours}.{gate}_proj.up", f"{theirs}.{gate}_b_proj"


def moe_names(ours: str, theirs: str, correction_bias: str) -> Iterator[tuple[str, str | Take]]:
    """Places of a mixture's parameters whose names differ from ours."""
    yield f"{ours}.shared_expert", f"{theirs}.shared_experts"
    yield f"{ours}.correction_bias", f"{theirs}.{correction_bias}"
