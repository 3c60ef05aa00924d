"""What a model needs, from its config and the headers of its weight files: the model is laid out, but no number is read.

MLX arrays are lazy, so that a model of any size can be built, and even called, without its memory: what its parameters
and its state would weigh is then read off the shapes of the very code that runs it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from . import arch
from .cuts import Deal, Uneven
from .layers import Ranks
from .layers.moe import Experts
from .layout import drop_reason, locate, unprefixed
from .model import Model
from .parallel import part_sizes, stage_sizes, stages, stored_groups, tensor_plan
from .spec import (
    AttentionSpec,
    GatedDeltaSpec,
    KdaSpec,
    LightningSpec,
    LinearAttentionSpec,
    MambaSpec,
    MlaSpec,
    ModelSpec,
    MoeSpec,
    RgLruSpec,
)
from .state import KVState, WindowState
from .weights import float32_parameters, stored_dtype
from .weights.checkpoint import TensorInfo

CONTEXTS = (8 * 1024, 64 * 1024, 256 * 1024, 1024 * 1024)
BITS, GROUP = (8, 6, 4), 64  # quantizations to show: integers of so many bits, with a scale and an offset a group
KINDS = {
    GatedDeltaSpec: "Gated DeltaNet",
    KdaSpec: "Kimi Delta Attention",
    LightningSpec: "Lightning attention",
    LinearAttentionSpec: "linear attention",
    RgLruSpec: "RG-LRU",
    MambaSpec: "Mamba",
    MlaSpec: "latent attention",
    AttentionSpec: "attention",
}


@dataclass(frozen=True)
class Figures:
    """All sizes in bytes, for one sequence; states and caches as they are with bfloat16 weights."""

    model_type: str
    layers: dict[str, int]  # kind of mixer -> layers
    experts: tuple[int, int] | None  # (all, used for a token) of a mixture's layer
    max_positions: int
    parameters: int
    active_parameters: int  # that one token is multiplied with
    weights: dict[str, int]  # in memory, by format; "stored": as this checkpoint loads
    on_disk: dict[str, int]  # by number format, as stored; empty where only a config is known
    state_bytes: int  # recurrent states, whatever the context
    kv_bytes_per_token: int  # of caches that grow with the context
    window_bytes_per_token: int  # of caches that grow until a window is full
    window: int
    ranks: int = 1  # of which one has all this
    whole: tuple[str, ...] = ()  # what every rank has whole, and why
    stages: tuple[
        tuple[int, int, int], ...
    ] = ()  # of each rank of a pipeline: its first layer, their end, bytes of its weights

    def context_bytes(self, tokens: int) -> int:
        """State and caches after so many tokens."""
        windows = self.window_bytes_per_token * min(tokens, self.window)
        return self.state_bytes + self.kv_bytes_per_token * tokens + windows

    def memory(self) -> dict[str, dict[int, int]]:
        """Weights, state and caches: format of the weights -> tokens of context -> bytes."""
        return {
            name: {tokens: size + self.context_bytes(tokens) for tokens in CONTEXTS}
            for name, size in self.weights.items()
        }


def figures(
    config: dict, tensors: Mapping[str, TensorInfo] | None = None, is_mlx: bool = False, ranks: int = 1
) -> Figures:
    """The figures of a model, from its config.json and, where there are weights, their headers.

    Args:
        config: the content of config.json.
        tensors: name -> header of every stored tensor; None where only the config is known.
        is_mlx: whether the tensors are in MLX layout (the files' metadata says so).
        ranks: tell what one of so many ranks has (``--parallel tensor``), and how they would share the layers (``pipeline``).

    Raises:
        CheckpointError: a config that no family knows, or knows but does not support.
    """
    family = arch.family(config)
    whole = family.spec(config)
    shapes = {unprefixed(name, family.PREFIXES): info.shape for name, info in (tensors or {}).items()}
    plan = tensor_plan(whole, ranks, stored_groups(dict(family.names(whole)), shapes if is_mlx else {}))
    spec = plan.share(0).spec
    model = Model(spec)
    plan.connect(model, Ranks(Deal(0, ranks)))
    sizes = {name: array.size for name, array in tree_flatten(model.parameters())}
    unused = at_rest(model, lambda array: array.size)
    mixtures = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoeSpec)]
    # Quantization groups are another thing that a cut may not go through.
    quantized = tensor_plan(whole, ranks, lambda module, inputs: 1 if inputs % GROUP else GROUP)
    weights = {"bfloat16": sum(_plain(model).values())} | _quantized_weights(Model(quantized.share(0).spec), family)
    if tensors is not None:
        weights = {"stored": _stored(whole, config, family, tensors, is_mlx, model), **weights}
    runs = ()
    if ranks > 1:
        stored = {unprefixed(name, family.PREFIXES): info for name, info in (tensors or {}).items()}
        runs = _runs(whole, ranks, part_sizes(whole, family, stored_dtype(config), stored if is_mlx else None))
    on_disk: Counter = Counter()
    for info in (tensors or {}).values():
        on_disk[info.dtype] += info.nbytes
    return Figures(
        model_type=spec.model_type,
        layers=dict(Counter(_kind(layer.mixer) for layer in spec.layers)),
        experts=(mixtures[0].experts, mixtures[0].top_k) if mixtures else None,
        max_positions=spec.max_positions,
        parameters=sum(sizes.values()),
        active_parameters=sum(sizes.values()) - unused - (0 if spec.tied else sizes["embed.weight"]),
        weights=weights,
        on_disk=dict(on_disk),
        ranks=ranks,
        whole=plan.left_whole(),
        stages=runs,
        **_state(model),
    )


def _runs(spec: ModelSpec, ranks: int, sizes: Mapping[str, int]) -> tuple[tuple[int, int, int], ...]:
    try:
        bounds = stages(sizes, len(spec.layers), ranks)
    except Uneven:
        return ()
    return tuple(zip(bounds, bounds[1:], stage_sizes(sizes, bounds)))


def _kind(mixer) -> str:
    if isinstance(mixer, GatedDeltaSpec) and not mixer.decay:
        return "DeltaNet"
    name = KINDS.get(type(mixer), type(mixer).__name__.removesuffix("Spec"))
    return f"window {name}" if getattr(mixer, "window", None) else name


def at_rest(model: Model, measure: Callable[[mx.array], int]) -> int:
    """What the experts that a token does not go through add up to; ``measure`` says what one array counts."""
    total = 0
    for layer in model.layers:
        mlp = layer.spec.mlp
        for _, module in layer.named_modules():
            if isinstance(module, Experts):
                size = sum(measure(array) for _, array in tree_flatten(module.parameters()))
                total += size * (mlp.experts - mlp.top_k) // mlp.experts
    return total


def quantized_bits(model: Model, family: ModuleType, bits: int) -> dict[str, int]:
    """Module -> its bits, of those modules that are quantized where ``bits`` are asked for; the family's rules may raise them."""
    names, chosen = dict(family.names(model.spec)), {}
    for path, module in model.named_modules():
        if hasattr(module, "to_quantized") and module.weight.shape[-1] % GROUP == 0:
            place = locate(path, names).sources[0]
            rule = next((rule for rule in family.QUANTIZE if re.fullmatch(rule.pattern, place)), None)
            if rule is None or rule.bits is not None:
                chosen[path] = max(bits, rule.bits) if rule is not None else bits
    return chosen


def _quantized_weights(model: Model, family: ModuleType) -> dict[str, int]:
    """Bytes of the weights, quantized as the family's rules have it."""
    totals, arrays = {}, dict(tree_flatten(model.parameters()))
    for bits in BITS:
        sizes = _plain(model)
        for path, width in quantized_bits(model, family, bits).items():
            size = arrays[f"{path}.weight"].size
            sizes[f"{path}.weight"] = size * width // 8 + size // GROUP * 4
        totals[f"{bits}-bit"] = sum(sizes.values())
    return totals


def _plain(model: Model) -> dict[str, int]:
    """Parameter -> its bytes in bfloat16, or float32 where it stays that."""
    pinned = float32_parameters(model)
    return {name: array.size * (4 if name in pinned else 2) for name, array in tree_flatten(model.parameters())}


def _stored(spec, config, family, tensors, is_mlx, model) -> int:
    """Bytes of the weights once they are loaded as they are: MLX's formats stay, others are decoded."""
    if is_mlx:
        drops = arch.dropped(family, spec)
        shares = _shares(spec, family, model)
        total = 0.0
        for name, info in tensors.items():
            plain = unprefixed(name, family.PREFIXES)
            if drop_reason(plain, drops) is None:
                module = plain.rpartition(".")[0]  # scales and biases go with their weight
                total += info.nbytes * shares.get(plain, shares.get(f"{module}.weight", 1.0))
        return round(total)
    pinned, wide = float32_parameters(model), stored_dtype(config).size
    return sum(array.size * (4 if name in pinned else wide) for name, array in tree_flatten(model.parameters()))


def _shares(whole: ModelSpec, family: ModuleType, model: Model) -> dict[str, float]:
    """Which part of each stored tensor's numbers ``model`` has, by the tensor's name in MLX layout."""
    names, have, of = dict(family.names(whole)), Counter(), Counter()
    own = {name: array.size for name, array in tree_flatten(model.parameters())}
    for name, array in tree_flatten(Model(whole).parameters()):
        for source in locate(name, names).sources:
            have[source] += own[name]
            of[source] += array.size
    return {source: have[source] / of[source] for source in of}


def _state(model: Model) -> dict[str, int]:
    """What one token leaves behind, from the shapes of an unevaluated call in bfloat16."""
    pinned = float32_parameters(model)
    narrow = [
        (name, array if name in pinned or not mx.issubdtype(array.dtype, mx.floating) else array.astype(mx.bfloat16))
        for name, array in tree_flatten(model.parameters())
    ]
    model.update(tree_unflatten(narrow))
    state = model.make_cache()
    model.hidden_states(mx.zeros((1, 1), mx.int32), state)
    growing = sum(
        array.nbytes // array.shape[2] for layer in state if isinstance(layer, KVState) for array in layer.state
    )
    windows = [layer for layer in state if isinstance(layer, WindowState)]
    in_windows = sum(array.nbytes // layer.window for layer in windows for array in layer.state)
    return {
        "state_bytes": state.recurrent_nbytes - sum(layer.nbytes for layer in windows),
        "kv_bytes_per_token": growing,
        "window_bytes_per_token": in_windows,
        "window": max((layer.window for layer in windows), default=0),
    }
