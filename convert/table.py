"""A plan as a table for people: one row a kind of tensor."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from mlx_linattn.budget import working_set

from .plan import Entry, Plan
from .quality import memory_needed

LAYER = re.compile(r"\.\d+\.")


@dataclass(frozen=True)
class Group:
    """Tensors that differ in their layer only."""

    name: str
    count: int
    parameters: int
    before: str
    after: str
    nbytes: int

    @property
    def cells(self) -> tuple[str, ...]:
        bits = f"{8 * self.nbytes / self.parameters:.2f}"
        return self.name, str(self.count), count(self.parameters), self.before, self.after, size(self.nbytes), bits


def groups(plan: Plan) -> list[Group]:
    kinds: dict[tuple[str, str, str], list[Entry]] = defaultdict(list)
    for entry in plan.entries:
        kinds[LAYER.sub(".*.", entry.target), entry.before, _after(entry)].append(entry)
    return [_group(name, before, after, entries) for (name, before, after), entries in kinds.items()]


def _group(name: str, before: str, after: str, entries: Sequence[Entry]) -> Group:
    return Group(name, len(entries), sum(e.parameters for e in entries), before, after, sum(e.nbytes for e in entries))


def _after(entry: Entry) -> str:
    return entry.dtype if entry.quantization is None else str(entry.quantization)


def table(plan: Plan) -> str:
    """Kinds of tensors with their number, parameters, dtype or bits before and after, bytes and bits per weight."""
    rows = [("tensor", "count", "parameters", "before", "after", "bytes", "bits/weight")]
    rows += [group.cells for group in groups(plan)]
    rows.append(_group("all", "", "", plan.entries).cells)
    lines = aligned(rows, left=(0, 3, 4))
    lines.insert(-1, "-" * len(lines[0]))
    return "\n".join([*lines, *_remarks(plan)])


def aligned(rows: list[tuple[str, ...]], left: tuple[int, ...]) -> list[str]:
    """Lines with columns of one width; the columns ``left`` hold words, the others numbers."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]


def _remarks(plan: Plan) -> list[str]:
    here = working_set()
    fits = "fits in" if plan.nbytes < 0.9 * here else "does not fit in"
    lines = [f"{size(plan.nbytes)} of weights: {fits} the {size(here)} of memory here"]
    lines.append(f"comparing it with its source on a page of text takes about {size(memory_needed(plan))}")
    reasons = Counter(entry.reason for entry in plan.entries if entry.reason)
    lines += [f"{number} weights treated apart: {reason}" for reason, number in reasons.most_common()]
    if plan.mtp:
        nbytes = sum(info.nbytes for info in plan.mtp.values())
        lines.append(f"{len(plan.mtp)} tensors kept as they are in mtp.safetensors ({size(nbytes)})")
    dropped = Counter(plan.dropped.values())
    lines += [f"{number} tensors dropped: {reason}" for reason, number in dropped.most_common()]
    return ["", *lines]


def count(number: int) -> str:
    return _scaled(number, ("", "K", "M", "B", "T"))


def size(nbytes: int) -> str:
    return _scaled(nbytes, (" B", " kB", " MB", " GB", " TB"))


def _scaled(number: float, units: tuple[str, ...]) -> str:
    power = min(len(units) - 1, max(0, len(str(int(number))) - 1) // 3)
    return f"{number / 1000**power:.{2 if power else 0}f}{units[power]}"
