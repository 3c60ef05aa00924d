"""Where tensors lie: the language in which a family says how its checkpoints are laid out. Pure data, no MLX.

Two layouts matter. *Published* is what the Hub's original repositories hold. *MLX layout* is what stock mlx_lm writes and
reads: experts stacked, convolutions as [C, K, 1], zero-centred norms with their 1 added. Names are compared without
their outer prefix (``model.language_model.`` and the like), so that one spelling serves all re-exports.

    published tensors --(PUBLISHED)--> MLX layout --(names)--> the model's parameters

Loading a published checkpoint takes both arrows, loading an MLX one the second, converting the first.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from .errors import CheckpointError

Step = tuple  # (name of a function in transform.STEPS, *arguments)


@dataclass(frozen=True)
class Take:
    """One tensor made from others: read ``sources``, then apply ``steps`` in order.

    As one way of several, it holds only where the tensor ``given`` is there too.
    """

    sources: tuple[str, ...]
    steps: tuple[Step, ...]
    given: str | None

    def __init__(self, sources: str | tuple[str, ...], *steps: Step, given: str | None = None):
        object.__setattr__(self, "sources", (sources,) if isinstance(sources, str) else tuple(sources))
        object.__setattr__(self, "steps", steps)
        object.__setattr__(self, "given", given)

    def suffixed(self, suffix: str) -> Take:
        return Take(tuple(source + suffix for source in self.sources), *self.steps)


@dataclass(frozen=True)
class Published:
    """Tensors of MLX layout whose name matches ``pattern`` are stored in one of these ways, the first that is there.

    Sources are templates: ``{0}`` the whole name, ``{1}`` the pattern's first group, ``{expert}`` each expert in turn.
    """

    pattern: str
    ways: tuple[Take, ...]

    def __init__(self, pattern: str, *ways: Take):
        object.__setattr__(self, "pattern", pattern)
        object.__setattr__(self, "ways", ways)


@dataclass(frozen=True)
class Quantize:
    """Weights whose module name matches: ``bits`` None keeps them as they are, otherwise they get at least so many bits."""

    pattern: str
    bits: int | None
    reason: str


def unprefixed(name: str, prefixes: Iterable[tuple[str, str]]) -> str:
    """A tensor's name without the outer prefix of its re-export."""
    for long, short in prefixes:
        if name.startswith(long):
            return short + name[len(long) :]
    return name


def locate(parameter: str, names: Mapping[str, str | Take]) -> Take:
    """Where a parameter of the model lies in MLX layout; the longest entry of ``names`` that leads to it decides."""
    head, tail = parameter, ""
    while head:
        if head in names:
            place = names[head]
            return (Take(place) if isinstance(place, str) else place).suffixed(tail)
        head, _, last = head.rpartition(".")
        tail = f".{last}{tail}"
    raise CheckpointError(f"no rule says where parameter {parameter!r} lies in a checkpoint")


def published_sources(name: str, published: Iterable[Published], present: Collection[str], experts: int) -> Take:
    """How a published checkpoint that has the tensors ``present`` stores the tensor ``name`` of MLX layout."""
    ways = [Take(name)]
    for rule in published:
        match = re.fullmatch(rule.pattern, name)
        if match:
            ways = [_expand(way, match, experts) for way in rule.ways]
            break
    for way in ways:
        if all(source in present for source in way.sources) and (way.given is None or way.given in present):
            return way
    nearest = max(ways, key=lambda way: sum(source in present for source in way.sources))
    missing = [source for source in nearest.sources if source not in present]
    more = f" (and {len(missing) - 1} more like it)" if len(missing) > 1 else ""
    raise CheckpointError(
        f"tensor {missing[0]!r} is missing from the checkpoint{more}: is a shard missing, or the download incomplete?"
    )


def _expand(way: Take, match: re.Match, experts: int) -> Take:
    fields = [match.group(0), *match.groups()]
    sources: list[str] = []
    for template in way.sources:
        if "{expert}" in template:
            sources += [template.format(*fields, expert=e) for e in range(experts)]
        else:
            sources.append(template.format(*fields))
    return Take(tuple(sources), *way.steps, given=way.given and way.given.format(*fields))


def drop_reason(name: str, dropped: Iterable[tuple[str, str]]) -> str | None:
    """Why a text model has no use for a tensor, or None."""
    return next((reason for pattern, reason in dropped if re.fullmatch(pattern, name)), None)
