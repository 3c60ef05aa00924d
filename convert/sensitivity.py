"""Which weights mind being rounded: each kind alone at several widths, and the recipe that a size buys least harm with.

The harm of a kind at a width is the mean KL divergence of the source's predictions from those of the model in which only
this kind is rounded. Harms of different kinds are taken to add up, which is what small ones nearly do.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from mlx_linattn import arch
from mlx_linattn.errors import RequestError
from mlx_linattn.layout import Take, locate
from mlx_linattn.model import Model
from mlx_linattn.weights import transform
from mlx_linattn.weights.checkpoint import ITEM_BITS, Checkpoint

from .bits import Quantization
from .plan import Plan
from .reader import Numbers
from .table import LAYER, aligned, count
from .tensors import Rows, dequantize

WIDTHS = (2, 3, 4, 5, 6, 8)


@dataclass
class Kind:
    """Weights that differ in their layer only."""

    name: str  # as the table has it, with * for the layer
    weights: tuple[str, ...]  # in MLX layout
    parameters: int
    overhead: float  # bits per weight of scales and offsets
    harm: dict[int, float] = field(default_factory=dict)  # bits -> mean KL, never rising with the bits

    @property
    def rule(self) -> str:
        return "^" + re.escape(self.name).replace(r"\*", r"\d+") + "$"


class Rounded(Numbers):
    """A checkpoint's tensors, some as they are after quantization."""

    rounding: dict[str, Quantization]  # by name in MLX layout

    def read(self, name: str, decoded_dtype: mx.Dtype = mx.float32, rows: Rows = None) -> mx.array:
        numbers = super().read(name, decoded_dtype, rows).astype(mx.float32)
        q = self.rounding.get(name)
        return numbers if q is None else dequantize(list(mx.quantize(numbers, q.group_size, q.bits, mode=q.mode)), q)


class Trials:
    """A model that says how much harm a rounding does on ``ids`` [B, T]. It must fit in memory, in float32."""

    def __init__(self, checkpoint: Checkpoint, ids: mx.array, group_size: int = 64):
        family = arch.family(checkpoint.config)
        self.ids, self.group_size = ids, group_size
        self._model = Model(family.spec(checkpoint.config))
        self._tensors = Rounded(checkpoint, family, self._model.spec)
        self._tensors.rounding = {}
        places = dict(family.names(self._model.spec))
        self._takes = {parameter: locate(parameter, places) for parameter, _ in tree_flatten(self._model.parameters())}
        self._fill(self._takes)
        self._reference = self._predictions()

    def harm(self, bits: dict[str, int]) -> float:
        """Mean KL divergence where these weights are rounded to so many bits and all others are not."""
        before, now = self._tensors.rounding, {name: Quantization(n, self.group_size) for name, n in bits.items()}
        changed = {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)}
        self._tensors.rounding = now
        self._fill({parameter: take for parameter, take in self._takes.items() if changed & set(take.sources)})
        p = self._reference
        return (mx.exp(p) * (p - self._predictions())).sum(-1).mean().item()

    def _fill(self, takes: dict[str, Take]) -> None:
        tensors = self._tensors
        made = [(name, transform.apply(take, [tensors.read(s) for s in take.sources])) for name, take in takes.items()]
        self._model.update(tree_unflatten(made))
        mx.eval([array for _, array in made])
        tensors.checkpoint.release()

    def _predictions(self) -> mx.array:
        logits = self._model(self.ids).astype(mx.float32)
        scores = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        mx.eval(scores)
        return scores


def kinds(plan: Plan, group_size: int) -> list[Kind]:
    """The weights that a plan quantizes and no family rule fixes."""
    found = defaultdict(list)
    for entry in plan.entries:
        free = entry.quantization is not None and entry.quantization.bits < 8 and entry.shape[-1] % group_size == 0
        if free:
            found[LAYER.sub(".*.", entry.target)].append(entry)
    return [
        Kind(
            name,
            tuple(e.name for e in group),
            sum(e.parameters for e in group),
            2 * ITEM_BITS[group[0].dtype] / group_size,
        )
        for name, group in found.items()
    ]


def measure(
    trials: Trials,
    found: list[Kind],
    widths: tuple[int, ...] = WIDTHS,
    progress: Callable[[int, int, str], None] = lambda *_: None,
) -> None:
    """Fill in every kind's harm."""
    done, total = 0, len(found) * len(widths)
    for kind in found:
        lowest = float("inf")
        for bits in sorted(widths):
            progress(done, total, f"{kind.name} at {bits} bits")
            lowest = kind.harm[bits] = min(lowest, trials.harm(dict.fromkeys(kind.weights, bits)))
            done += 1
    progress(total, total, "")


def best_recipe(plan: Plan, found: list[Kind], trials: Trials, bits_per_weight: float) -> tuple[dict[str, int], float]:
    """The least harmful of the recipes that begin at each width, each tried as a whole; and its harm.

    Harms add up only while they are small, so that a sum alone would trust widths that are too few. The recipe that begins
    at the width of a uniform one of this size is that uniform one or better.
    """
    tried: list[tuple[float, dict[str, int]]] = []
    for floor in sorted(found[0].harm):
        try:
            chosen = recipe(plan, found, bits_per_weight, floor)
        except RequestError:
            if not tried:
                raise
            break
        if all(chosen != other for _, other in tried):
            bits = {weight: chosen[kind.name] for kind in found for weight in kind.weights}
            tried.append((trials.harm(bits), chosen))
    harm, chosen = min(tried, key=lambda one: one[0])
    return chosen, harm


def recipe(plan: Plan, found: list[Kind], bits_per_weight: float, floor: int = 0) -> dict[str, int]:
    """Bits for each kind, at least ``floor``, so that the whole model has at most ``bits_per_weight`` and the summed harm is least.

    From the fewest bits upwards, the raise that saves most harm a byte comes next (raises of several steps included).
    """
    free = {weight for kind in found for weight in kind.weights}
    budget = bits_per_weight * plan.parameters - 8 * sum(e.nbytes for e in plan.entries if e.name not in free)
    chosen = {kind.name: min(bits for bits in kind.harm if bits >= floor) for kind in found}
    budget -= sum(kind.parameters * (chosen[kind.name] + kind.overhead) for kind in found)
    if budget < 0:
        raise RequestError(f"{bits_per_weight:g} bits per weight cannot be reached: the fewest bits take more")
    while True:
        raises = [
            ((kind.harm[chosen[kind.name]] - harm) / cost, kind.name, bits, cost)
            for kind in found
            for bits, harm in kind.harm.items()
            if 0 < (cost := kind.parameters * (bits - chosen[kind.name])) <= budget
        ]
        best = max(raises, default=(0.0, "", 0, 0.0))
        if best[0] <= 0:
            return chosen
        _, name, chosen_bits, cost = best
        chosen[name] = chosen_bits
        budget -= cost


def rules(found: list[Kind], chosen: dict[str, int], group_size: int = 64) -> list[str]:
    """The recipe as lines of a recipe file."""
    return [f"{kind.rule}={chosen[kind.name]},g={group_size}" for kind in found]


def table(found: list[Kind], chosen: dict[str, int]) -> str:
    """Every kind's harm at every width, and the width that the recipe gives it."""
    widths = sorted({bits for kind in found for bits in kind.harm})
    rows = [("weight", "parameters", *(f"{bits}-bit" for bits in widths), "recipe")]
    for kind in sorted(found, key=lambda kind: -kind.harm[widths[0]]):
        harms = (f"{kind.harm[bits]:.2g}" for bits in widths)
        rows.append((kind.name, count(kind.parameters), *harms, f"{chosen[kind.name]}-bit"))
    return "\n".join(["mean KL divergence where only this kind of weight is rounded:", *aligned(rows, left=(0,))])
