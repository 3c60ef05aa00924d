"""Recall as a heat map: blocks in the terminal, a picture with matplotlib."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table
from rich.text import Text

from . import chart
from .machine import sentence
from .modes import short
from .table import console

LOW, HIGH = (202, 72, 60), (60, 150, 90)


def show(found: dict) -> None:
    """On stdout: right answers of those asked, a row for each mode and kind, a column for each distance."""
    out = console()
    out.print(f"{title(found)}; {sentence(found['machine'])}", markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("mode", "kind"):
        table.add_column(name, no_wrap=True)
    scores, modes, kinds, distances = axes(found)
    for distance in distances:
        table.add_column(short(distance), justify="center")
    for mode in modes:
        for kind in kinds:
            blocks = [_block(scores.get((mode, kind, distance))) for distance in distances]
            table.add_row(mode if kind == kinds[0] else "", kind, *blocks)
    out.print(table)
    out.print(
        "answers with the exact value, of those asked, by tokens between what was told and the question", markup=False
    )


def title(found: dict) -> str:
    settings = found["settings"]
    return (
        f"{settings['model']}: constant keeps {settings['max_kv_size']:,} tokens in attention, "
        f"quantized-kv {settings['kv_bits']} bits"
    )


def axes(found: dict) -> tuple[dict, list[str], list[str], list[int]]:
    """(mode, kind, distance) -> (right, asked); and the three in order."""
    cells = found["cells"]
    scores = {(one["mode"], one["kind"], one["distance"]): (one["right"], one["asked"]) for one in cells}
    modes, kinds = (list(dict.fromkeys(one[key] for one in cells)) for key in ("mode", "kind"))
    return scores, modes, kinds, sorted({one["distance"] for one in cells})


def _block(score: tuple[int, int] | None) -> Text:
    if score is None:
        return Text("")
    right, asked = score
    share = right / asked
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(LOW, HIGH))
    return Text(f" {right:>3}/{asked:<3} ", style=f"white on rgb({red},{green},{blue})")


def draw(plt, found: dict, file: Path) -> None:
    scores, modes, kinds, distances = axes(found)
    figure, panels = plt.subplots(1, max(len(modes), 1), figsize=(3.6 * max(len(modes), 1) + 0.6, 2.9), squeeze=False)
    for panel, mode in zip(panels[0], modes):
        shares = [[_share(scores.get((mode, kind, distance))) for distance in distances] for kind in kinds]
        panel.imshow(shares, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto", alpha=0.85)
        for i, kind in enumerate(kinds):
            for j, distance in enumerate(distances):
                right, asked = scores.get((mode, kind, distance), (0, 0))
                panel.text(j, i, f"{right}/{asked}" if asked else "", ha="center", va="center")
        panel.set_xticks(range(len(distances)), [short(distance) for distance in distances])
        panel.set_yticks(range(len(kinds)), kinds if panel is panels[0][0] else [""] * len(kinds))
        panel.set_title(mode)
        panel.set_xlabel("tokens since")
    figure.suptitle(f"right answers; {title(found)}", y=0.98, fontsize=9)
    figure.text(0.01, 0.01, sentence(found["machine"]), fontsize=6.5, color="#555555")
    figure.tight_layout(rect=(0, 0.04, 1, 0.98))
    chart.save(plt, figure, file)


def _share(score: tuple[int, int] | None) -> float:
    return float("nan") if score is None else score[0] / score[1]
