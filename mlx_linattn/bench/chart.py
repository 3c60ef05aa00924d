"""The same as pictures, with matplotlib (``pip install 'mlx-linattn[plot]'``)."""

from __future__ import annotations

import io
import textwrap
from pathlib import Path

from .machine import sentence
from .modes import short
from .predict import TIMES
from .rows import FILLED, PREDICTED, Report, Row, write
from .sides import Ours

COLOURS = {"exact": "#4477aa", "quantized-kv": "#ccbb44", "constant": "#228833"}  # Paul Tol's, for all eyes
MISSING = "no picture without matplotlib: pip install 'mlx-linattn[plot]'"
PANELS = (
    ("memory in use", "MB", lambda row: row.active_bytes / 1e6),
    ("time of a token", "ms", lambda row: row.decode_ms),
    ("reading, newest interval", "tokens/s", lambda row: row.prefill_tps),
)


def pyplot():
    """matplotlib without a window, its SVGs the same each time; None where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("agg")
    matplotlib.rcParams.update({"svg.hashsalt": "mlx_linattn", "svg.fonttype": "none", "font.size": 9})
    import matplotlib.pyplot as plt

    return plt


def save(plt, figure, file: Path) -> None:
    """As the file's suffix says: .svg or .png."""
    buffer = io.BytesIO()
    kind = file.suffix.removeprefix(".")
    figure.savefig(buffer, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    plt.close(figure)
    write(file, buffer.getvalue())


def draw(plt, report: Report, file: Path) -> None:
    """Memory and speed over the context, a line for each mode; what was predicted is dashed and hollow."""
    figure, axes = plt.subplots(1, len(PANELS), figsize=(11, 3.9))
    names = list(dict.fromkeys((row.library, row.mode) for row in report.rows))
    for axis, (title, unit, value) in zip(axes, PANELS):
        for library, mode in names:
            rows = [row for row in report.rows if (row.library, row.mode) == (library, mode) and value(row) is not None]
            _line(axis, rows, value, library, mode)
        contexts = sorted({row.context for row in report.rows})
        axis.set_xscale("log", base=4)
        axis.set_xticks(contexts, [short(context) for context in contexts], fontsize="x-small")
        axis.set_xticks([], minor=True)
        axis.set_ylim(bottom=0)
        axis.set_title(f"{title}, {unit}")
        axis.set_xlabel("context, tokens")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=len(labels), frameon=False, bbox_to_anchor=(0.5, 0.94))
    figure.suptitle(report.title, y=0.99, fontweight="bold")
    notes = [sentence(report.machine) + ("" if not _busy(report) else f"; {_busy(report)}")]
    if any(row.kind == PREDICTED for row in report.rows):
        notes.append(f"dashed: predicted, not run; {TIMES}")
    if any(row.kind == FILLED for row in report.rows):
        notes.append("squares: the context was not read; zeros stand in its place")
    text = "\n".join(line for note in notes for line in textwrap.wrap(note, 170))
    figure.text(0.01, 0.01, text, fontsize=7, color="#555555", va="bottom")
    figure.tight_layout(rect=(0, 0.03 + 0.03 * (text.count("\n") + 1), 1, 0.92))
    save(plt, figure, file)


def _line(axis, rows: list[Row], value, library: str, mode: str) -> None:
    run = [row for row in rows if row.kind != PREDICTED]
    colour = COLOURS.get(mode, "#aa3377")
    ours = library == Ours.name
    style = {"color": colour, "alpha": 1.0 if ours else 0.45}
    if run:
        marker = "s" if run[-1].kind == FILLED else "o"
        label = mode if ours else f"{library}, {mode}"
        axis.plot(
            [r.context for r in run],
            [value(r) for r in run],
            ("-" if ours else ":") + marker,
            ms=4,
            label=label,
            **style,
        )
    tail = [*run[-1:], *(row for row in rows if row.kind == PREDICTED)]
    if len(tail) > 1:
        axis.plot([r.context for r in tail], [value(r) for r in tail], "--", lw=1, **style)
        axis.plot([r.context for r in tail[1:]], [value(r) for r in tail[1:]], "o", ms=4, mfc="white", **style)


def _busy(report: Report) -> str:
    """Said where more wanted to run than one bench's threads."""
    loads = [row.load for row in report.rows if row.load is not None]
    busy = loads and max(loads) > 2 * (report.machine["cores"] or 1)
    return f"a shared machine, load {max(loads):.0f}" if busy else ""
