"""A model of random weights, made where they will stay: no file, and no unquantized copy of what is quantized."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from .. import arch, parallel
from ..cuts import COLUMNS
from ..figures import GROUP, quantized_bits
from ..layout import locate
from ..model import Model
from ..parallel import Group
from ..weights import float32_parameters
from ..weights.checkpoint import TensorInfo

NORM = 0.25


def random_model(
    config: dict,
    bits: int | None = 4,
    dtype: mx.Dtype = mx.bfloat16,
    seed: int = 0,
    group: Group | None = None,
    on_every_rank: Callable[[Model], None] | None = None,
) -> Model:
    """A model of this config whose matrices are random.

    Args:
        bits: of quantized weights, as the family's rules have it (``mlx-linattn info`` shows the sizes); None quantizes nothing.
        dtype: of all that is neither quantized nor float32 in any case.
        group, on_every_rank: as :func:`mlx_linattn.load_model` takes them. Each rank draws its own part.

    The codes of quantized weights are drawn as they are, each group with the same scale and offset. A matrix has entries of
    variance 1 / inputs, embeddings have variance 1, and norms multiply by a quarter: as in trained models, a layer adds little
    to what it reads. Otherwise roundings would grow from layer to layer, and no two programs could be compared.
    Gates and decays are those of a new model.
    """
    family = arch.family(config)
    model = Model(family.spec(config))
    wanted = {} if bits is None else quantized_bits(model, family, bits)
    _quantize(model, wanted)
    if group is None:
        _draw(model, dtype, seed)
        return model
    with parallel.together(group, model=f"{model.spec.model_type}, {bits} bits, {dtype}"):
        model, ranks = parallel.build(_Imagined(config, _stored(model, family, dtype)), family, group)
        _quantize(model, wanted)
        _draw(model, dtype, seed, ranks.share)
    parallel.run(model, ranks, on_every_rank)
    return model


def _quantize(model: Model, wanted: dict[str, int]) -> None:
    def settings(path: str, _) -> dict | bool:
        return path in wanted and {"group_size": GROUP, "bits": wanted[path]}

    nn.quantize(model, class_predicate=settings)  # lazy, as the weights are: only names and shapes come of it


def _draw(model: Model, dtype: mx.Dtype, seed: int, share: parallel.Share | parallel.Stage | None = None) -> None:
    """Give the model its numbers; of ``share`` each rank has its own, but all have the same of what is whole on all."""
    pinned = float32_parameters(model)
    packed = {
        f"{path}.{part}": module for path, module in model.named_modules() if "scales" in module for part in module
    }
    parameters = tree_flatten(model.parameters())
    made = []
    for key, (name, like) in zip(mx.random.split(mx.random.key(seed), len(parameters)), parameters):
        if share is not None and not share.has(name):
            continue
        module, cut = packed.get(name), None if share is None else share.cut(name)
        inputs = like.shape[-1] if module is None else module.scales.shape[-1] * module.group_size
        if cut is not None:
            key = mx.random.split(key, share.deal.ranks)[share.deal.rank]
            inputs = cut.size if cut.axis == COLUMNS and cut.blocks else inputs
        spread = 1.0 if name.startswith("embed.") else inputs**-0.5
        if module is not None and not name.endswith(".bias"):
            array = _packed(name.rpartition(".")[2], module.bits, like.shape, spread, key)
        elif like.ndim > 1:
            array = mx.random.normal(like.shape, key=key) * spread
        else:
            array = like * NORM if name.endswith("norm.weight") else like
        if array.dtype != mx.uint32:
            array = array.astype(mx.float32 if name in pinned else dtype)
        mx.eval(array)
        made.append((name, array))
    model.update(tree_unflatten(made))


class _Imagined(NamedTuple):
    """A checkpoint in MLX layout that is nowhere stored, as far as the ranks look at one to share it."""

    config: dict
    tensors: dict[str, TensorInfo]
    is_mlx: bool = True


def _stored(model: Model, family: ModuleType, dtype: mx.Dtype) -> dict[str, TensorInfo]:
    """The tensors of such a checkpoint, each with the whole of a parameter, whatever it would be made of."""
    names, pinned, found = dict(family.names(model.spec)), float32_parameters(model), {}
    for name, array in tree_flatten(model.parameters()):
        wide = "F32" if name in pinned or dtype == mx.float32 else "BF16"
        kind = "U32" if array.dtype == mx.uint32 else wide
        found[locate(name, names).sources[0]] = TensorInfo(Path(), kind, array.shape)
    return found


def _packed(part: str, bits: int, shape: tuple[int, ...], spread: float, key: mx.array) -> mx.array:
    """The codes, scales or offsets of weights around 0 with this standard deviation."""
    if part == "weight":
        halves = mx.random.randint(0, 2**16, (*shape[:-1], 2 * shape[-1]), mx.uint16, key=key)
        return halves.view(mx.uint32)
    most = 2**bits - 1
    scale = spread * (12 / (most * (most + 2))) ** 0.5  # codes 0 to most have variance most (most + 2) / 12
    return mx.full(shape, {"scales": scale, "biases": -scale * most / 2}[part])
