"""Tensor parallel: which layers of a model are dealt out to N ranks and which every rank has whole, and why."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, repeat

from ..cuts import COLUMNS, Block, Cut, Deal, Uneven, nested, rows
from ..layers import BUILDS, Ranks
from ..layout import Take, locate
from ..model import Model
from ..spec import ModelSpec


@dataclass(frozen=True)
class Plan:
    """A model's spec as config.json has it, and the cuts of its parameters (or of the modules they lie in)."""

    spec: ModelSpec
    ranks: int
    cuts: dict[str, Cut]
    whole: dict[str, str] = field(default_factory=dict)  # what stays whole ("layers.3.mixer") and why

    def share(self, rank: int) -> Share:
        return Share(self, Deal(rank, self.ranks))

    def part(self, deal: Deal) -> ModelSpec:
        """The spec of what one rank builds."""
        layers = []
        for i, layer in enumerate(self.spec.layers):
            parts = {}
            for part in ("mixer", "mlp"):
                spec = getattr(layer, part)
                if self._is_cut(f"layers.{i}.{part}"):
                    spec = BUILDS[type(spec)].share(spec, deal)
                parts[part] = spec
            layers.append(replace(layer, **parts))
        parts = self.ranks if self._is_cut("embed") else 1
        return replace(self.spec, layers=tuple(layers), vocab_parts=parts)

    def _is_cut(self, part: str) -> bool:
        return any(name == part or name.startswith(f"{part}.") for name in self.cuts)

    def connect(self, model: Model, ranks: Ranks) -> None:
        """Let the layers of a rank's model know the others."""
        model.ranks = ranks
        for i, layer in enumerate(model.layers):
            for part in ("mixer", "mlp"):
                if self._is_cut(f"layers.{i}.{part}"):
                    layer[part].ranks = ranks

    def state_cuts(self, layer: int) -> Iterator[Cut | None]:
        """How the arrays of a layer's state are cut, one after the other; None where every rank has the whole."""
        mixer = self.spec.layers[layer].mixer
        cuts = BUILDS[type(mixer)].state_cuts(mixer) if self._is_cut(f"layers.{layer}.mixer") else (None,)
        return chain(cuts, repeat(cuts[-1]))

    def left_whole(self) -> tuple[str, ...]:
        """What every rank has whole, and why, in a sentence a reason."""
        counts: dict[str, Counter] = {}
        for part, reason in self.whole.items():
            kind = "embedding and head" if part == "embed" else part.rpartition(".")[2]
            counts.setdefault(re.sub(r"layers\.\d+\.", "", reason), Counter())[kind] += 1
        return tuple(
            f"{', '.join(kind if kind[0] == 'e' else f'{kind} of {n} layers' for kind, n in kinds.items())}: {reason}"
            for reason, kinds in counts.items()
        )

    def cut(self, parameter: str) -> Cut | None:
        """How a parameter is cut; None where every rank has it whole. A Cut without blocks: the first rank has it alone."""
        head, tail = parameter, ""
        while head not in self.cuts:
            head, _, last = head.rpartition(".")
            if not head:
                return None
            tail = f"{last}.{tail}" if tail else last
        cut = self.cuts[head]
        if tail == "bias":
            return Cut(COLUMNS, () if cut.axis == COLUMNS else cut.blocks)
        return cut


@dataclass(frozen=True)
class Share:
    """What one rank has of a model."""

    plan: Plan
    deal: Deal

    @property
    def whole(self) -> ModelSpec:
        """The whole model, as config.json has it."""
        return self.plan.spec

    @property
    def spec(self) -> ModelSpec:
        """What this rank builds."""
        return self.plan.part(self.deal)

    def cut(self, parameter: str) -> Cut | None:
        return self.plan.cut(parameter)


def stored_groups(names: Mapping[str, str | Take], shapes: Mapping[str, tuple[int, ...]]) -> Callable[[str, int], int]:
    """The ``packed`` of :func:`tensor_plan` for a checkpoint of MLX layout, from the shapes of its tensors."""

    def packed(module: str, inputs: int) -> int:
        scales = shapes.get(f"{locate(module, names).sources[0]}.scales")
        return 1 if scales is None else inputs // scales[-1]

    return packed


def tensor_plan(spec: ModelSpec, ranks: int, packed: Callable[[str, int], int] = lambda module, inputs: 1) -> Plan:
    """Deal ``spec`` out to ``ranks`` ranks.

    ``packed(module, inputs)`` says how many of the inputs of a projection ("layers.0.mlp.down_proj") are stored in one
    piece, which no cut may go through: the size of its quantization groups; 1 where it is not quantized.
    """
    cuts: dict[str, Cut] = {}
    whole: dict[str, str] = {}
    vocabulary = {"embed": rows(Block(spec.vocab_size)), "head": rows(Block(spec.vocab_size))}
    parts = [("embed", None, vocabulary)]
    for i, layer in enumerate(spec.layers):
        parts += [(f"layers.{i}.{part}", getattr(layer, part), None) for part in ("mixer", "mlp")]
    for name, part, found in parts:
        if name != "embed" and part is None:
            continue
        try:
            if found is None:
                kind = BUILDS[type(part)]
                kind.share(part, Deal(0, ranks))
                found = nested(name, kind.cuts(part))
            else:
                Deal(0, ranks).even(spec.vocab_size, "words of the vocabulary")
            for module, cut in found.items():
                if cut.axis == COLUMNS and (group := packed(module, cut.size)) > 1:
                    _fits(module, cut, group, ranks)
        except Uneven as error:
            whole[name] = str(error)
        else:
            cuts |= found
    return Plan(spec, ranks, cuts, whole)


def _fits(module: str, cut: Cut, group: int, ranks: int) -> None:
    for rank in range(ranks):
        edges = [edge for pair in cut.ranges(Deal(rank, ranks)) for edge in pair]
        if any(edge % group for edge in edges):
            raise Uneven(f"{module} is quantized in groups of {group} inputs, and {ranks} ranks would cut through one")
