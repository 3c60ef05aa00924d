"""Pipeline parallel: which run of layers each of N ranks has."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import ModuleType

import mlx.core as mx
from mlx.utils import tree_flatten

from ..cuts import Deal, Uneven
from ..layout import locate
from ..model import Model
from ..spec import ModelSpec
from ..weights import float32_parameters
from ..weights.checkpoint import TensorInfo


@dataclass(frozen=True)
class Stage:
    """One rank's run of layers. The first rank has all that comes before and behind them too: it makes the logits.

    So a tied embedding is held once, logits stay where they are sampled, and what comes back to the first rank is as
    small as what goes from rank to rank.
    """

    whole: ModelSpec
    deal: Deal
    bounds: tuple[int, ...]  # each rank's first layer, and how many layers there are

    @property
    def spec(self) -> ModelSpec:
        """What this rank builds: the whole model, without the weights of what others have."""
        return self.whole

    @property
    def first(self) -> int:
        return self.bounds[self.deal.rank]

    @property
    def end(self) -> int:
        return self.bounds[self.deal.rank + 1]

    def owner(self, layer: int) -> int:
        """The rank that has a layer."""
        return next(rank for rank, end in enumerate(self.bounds[1:]) if layer < end)

    def has(self, parameter: str) -> bool:
        match = re.match(r"layers\.(\d+)\.", parameter)
        return self.owner(int(match[1]) if match else 0) == self.deal.rank

    def cut(self, parameter: str) -> None:
        """Nothing is cut."""


def stages(sizes: Mapping[str, int], layers: int, ranks: int) -> tuple[int, ...]:
    """The bounds of N runs of ``layers`` layers, so that the rank with the most bytes has as few as can be.

    sizes: of each part of the model ("layers.3", and all else), as :func:`part_sizes` gives them.
    Raises Uneven where there are fewer layers than ranks.
    """
    if layers < ranks:
        raise Uneven(f"{layers} layers are too few for {ranks} ranks")
    own = [sizes[f"layers.{i}"] for i in range(layers)]
    besides = sum(size for part, size in sizes.items() if not part.startswith("layers."))
    upto = list(accumulate([besides, *own]))
    # Of the ranks so far, by where their layers end: (most bytes, sum of squares, first layers). The squares decide between equals.
    best = {end: (upto[end], upto[end] ** 2, (0,)) for end in range(1, layers + 1)}

    def longer(first: int, size: int) -> tuple:
        most, squares, firsts = best[first]
        return max(most, size), squares + size**2, (*firsts, first)

    for rank in range(1, ranks):
        best = {
            end: min(longer(first, upto[end] - upto[first]) for first in range(rank, end))
            for end in range(rank + 1, layers + 1)
        }
    return (*best[layers][2], layers)


def stage_sizes(sizes: Mapping[str, int], bounds: tuple[int, ...]) -> list[int]:
    """Bytes of each rank."""
    found = [sum(sizes[f"layers.{i}"] for i in range(*pair)) for pair in pairwise(bounds)]
    found[0] += sum(size for part, size in sizes.items() if not part.startswith("layers."))
    return found


def part_sizes(
    spec: ModelSpec, family: ModuleType, wide: mx.Dtype, stored: Mapping[str, TensorInfo] | None = None
) -> Counter:
    """Bytes of each part of a model: of "layers.3", "embed" and so on.

    wide: the dtype of weights.  stored: the tensors of a checkpoint in MLX layout, by their names without prefix; they are held as
        they are stored.
    """
    model, names = Model(spec), dict(family.names(spec))
    pinned, sizes, homes = float32_parameters(model), Counter(), {}
    for parameter, array in tree_flatten(model.parameters()):
        part = re.match(r"layers\.\d+|\w+", parameter)[0]
        sizes[part] += 0 if stored else array.size * (4 if parameter in pinned else wide.size)
        for source in locate(parameter, names).sources:
            homes[source] = part
    for tensor, info in (stored or {}).items():
        module = tensor.rpartition(".")[0]  # scales and biases lie beside their weight
        part = homes.get(tensor) or homes.get(f"{module}.weight")
        if part is not None:
            sizes[part] += info.nbytes
    return sizes
