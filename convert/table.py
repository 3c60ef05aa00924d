"""A plan as a table for people: one row a kind of tensor."""

from __future__ import annotations

import re
from collections import Counter, defaultdict

from .plan import Entry, Plan

LAYER = re.compile(r"\.\d+\.")


def table(plan: Plan) -> str:
    """Kinds of tensors with their number, parameters, dtype or bits before and after, bytes and bits per weight."""
    groups: dict[tuple[str, str, str], list[Entry]] = defaultdict(list)
    for entry in plan.entries:
        groups[LAYER.sub(".*.", entry.target), entry.before, _after(entry)].append(entry)
    rows = [("tensor", "count", "parameters", "before", "after", "bytes", "bits/weight")]
    for (kind, before, after), entries in groups.items():
        rows.append(_row(kind, before, after, entries))
    rows.append(_row("all", "", "", list(plan.entries)))
    lines = _aligned(rows)
    lines.insert(-1, "-" * len(lines[0]))
    return "\n".join([*lines, *_remarks(plan)])


def _after(entry: Entry) -> str:
    return entry.dtype if entry.quantization is None else str(entry.quantization)


def _row(kind: str, before: str, after: str, entries: list[Entry]) -> tuple[str, ...]:
    parameters, nbytes = sum(e.parameters for e in entries), sum(e.nbytes for e in entries)
    return kind, str(len(entries)), count(parameters), before, after, size(nbytes), f"{8 * nbytes / parameters:.2f}"


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    left = (0, 3, 4)  # columns of words; the others hold numbers
    return [
        "  ".join(
            cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]


def _remarks(plan: Plan) -> list[str]:
    lines = []
    reasons = Counter(entry.reason for entry in plan.entries if entry.reason)
    lines += [f"{number} weights treated apart: {reason}" for reason, number in reasons.most_common()]
    if plan.mtp:
        nbytes = sum(info.nbytes for info in plan.mtp.values())
        lines.append(f"{len(plan.mtp)} tensors kept as they are in mtp.safetensors ({size(nbytes)})")
    dropped = Counter(plan.dropped.values())
    lines += [f"{number} tensors dropped: {reason}" for reason, number in dropped.most_common()]
    return ["", *lines] if lines else []


def count(number: int) -> str:
    return _scaled(number, ("", "K", "M", "B", "T"))


def size(nbytes: int) -> str:
    return _scaled(nbytes, (" B", " kB", " MB", " GB", " TB"))


def _scaled(number: float, units: tuple[str, ...]) -> str:
    power = min(len(units) - 1, max(0, len(str(int(number))) - 1) // 3)
    return f"{number / 1000**power:.{2 if power else 0}f}{units[power]}"
