"""Stock mlx_lm on the very same weights: its own model class, its own cache, its own generation."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from .. import arch
from ..errors import RequestError
from ..interop.door import mlx_lm
from ..layout import Take, locate
from ..model import Model
from ..state import KVOptions
from ..weights import float32_parameters, transform
from .sides import Progress, paced

NAME = "mlx_lm"
GROWING = ("KVCache", "QuantizedKVCache")


def build(model: Model, config: dict):
    """mlx_lm's model of this config, holding the arrays of ``model``: all that is large is shared.

    Raises RequestError where mlx_lm does not know the type, or has tensors that ours cannot be turned into.
    """
    family = arch.family(config)
    names, prefix = dict(family.names(model.spec)), family.MLX_PREFIX
    theirs = _empty(config, family, model.spec.model_type)
    quantized = {
        prefix + locate(path, names).sources[0]: {"group_size": m.group_size, "bits": m.bits, "mode": m.mode}
        for path, m in model.named_modules()
        if "scales" in m
    }
    nn.quantize(theirs, class_predicate=lambda path, _: quantized.get(path, False))
    shapes = {name: array.shape for name, array in tree_flatten(theirs.parameters())}
    pinned, dtype = float32_parameters(model), model.embed(mx.array([0])).dtype
    keeps = getattr(theirs, "cast_predicate", lambda _: True)  # what its own conversion would cast
    given = []
    for parameter, array in tree_flatten(model.parameters()):
        take = locate(parameter, names)
        places = [prefix + source for source in take.sources]
        missing = [place for place in places if place not in shapes]
        if missing:
            raise RequestError(f"--vs {NAME}: its {model.model_type} has no tensor {missing[0]!r}; leave out --vs")
        for place, part in zip(places, undone(take, array, [shapes[place] for place in places])):
            given.append((place, part.astype(dtype) if parameter in pinned and keeps(place) else part))
    try:
        theirs.load_weights(given)
    except ValueError as error:
        raise RequestError(f"--vs {NAME}: {str(error).splitlines()[0]}; leave out --vs") from error
    mx.eval(theirs.parameters())
    return theirs


def _empty(config: dict, family, model_type: str):
    stock = family.mlx_config(config) if hasattr(family, "mlx_config") else config
    if stock is None:
        raise RequestError(f"--vs {NAME}: it cannot express this config; leave out --vs")
    stock = copy.deepcopy(stock) | {"model_type": family.MLX_TYPES.get(model_type, model_type)}
    try:
        made, arguments = mlx_lm("utils")._get_classes(stock)
    except ValueError as error:
        raise RequestError(f"--vs {NAME}: it does not know model_type {model_type!r}; leave out --vs") from error
    return made(arguments.from_dict(stock))


def undone(take: Take, array: mx.array, shapes: Sequence[tuple[int, ...]]) -> list[mx.array]:
    """The tensors of these shapes from which ``take`` makes ``array``, where its steps only join and reshape."""
    if not take.steps:
        return [array]
    sizes = [math.prod(shape) for shape in shapes]
    flat, ends = array.reshape(-1), [sum(sizes[: i + 1]) for i in range(len(sizes))]
    parts = [flat[end - size : end].reshape(shape) for size, end, shape in zip(sizes, ends, shapes)]
    if ends[-1] != array.size or not mx.array_equal(transform.apply(take, parts), array).item():
        raise RequestError(f"--vs {NAME}: {take.sources[0]!r} is kept in another layout there; leave out --vs")
    return parts


class Peer:
    """Stock mlx_lm, on one cache."""

    name = NAME

    def __init__(self, model, options: KVOptions, step: int):
        self.model, self.step = model, step
        self.cache = model.make_cache()
        self.options = {"kv_bits": options.kv_bits, "kv_group_size": options.kv_group_size, "quantized_kv_start": 0}
        self.generate_step = mlx_lm("generate").generate_step

    def read(self, ids: Sequence[int], room: int, progress: Progress) -> None:
        stream = self.generate_step(
            mx.array(ids), self.model, max_tokens=0, prompt_cache=self.cache, prefill_step_size=self.step,
            prompt_progress_callback=lambda done, _: progress(done), **self.options,
        )  # fmt: skip
        for _ in stream:  # with max_tokens 0 there is none: this is how mlx_lm.cache_prompt reads
            pass
        self._settle()

    def skip(self, tokens: int, room: int) -> None:
        for one in self.cache:
            if _grows(one):
                end = one.offset

                def longer(array):
                    shape = (*array.shape[:2], tokens, array.shape[3])
                    return mx.concatenate([array[:, :, :end], mx.zeros(shape, array.dtype)], axis=2)  # noqa: B023

                one.keys, one.values = tree_map(longer, (one.keys, one.values))
                one.offset += tokens
        self._settle()

    def write(self, token: int, count: int) -> list[float]:
        stream = self.generate_step(
            mx.array([token]), self.model, max_tokens=count + 1, prompt_cache=self.cache, **self.options
        )
        times = paced(stream)
        self._settle()
        return times

    def _settle(self) -> None:
        mx.eval([one.state for one in self.cache])

    def mark(self) -> Any:
        """mlx_lm has none: of a growing cache its length, of others the arrays, which it replaces and never changes."""
        return [one.offset if _grows(one) else tree_map(lambda x: x, one.state) for one in self.cache]

    def back_to(self, mark: Any) -> None:
        for one, part in zip(self.cache, mark):
            if _grows(one):
                one.offset = part
            else:
                one.state = part

    @property
    def state_bytes(self) -> int:
        return sum(one.nbytes for one in self.cache if not _grows(one))

    @property
    def kv_bytes(self) -> int:
        return sum(one.nbytes for one in self.cache if _grows(one))


def _grows(cache) -> bool:
    return type(cache).__name__ in GROWING
