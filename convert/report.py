"""What a conversion leaves about itself: conversion_report.json for programs, README.md (the model card) for people."""

from __future__ import annotations

import importlib.metadata
import sys
from collections import Counter
from dataclasses import asdict

import mlx.core as mx

import mlx_linattn

from .plan import Plan
from .table import groups, size
from .verify import Verification

REPORT, CARD = "conversion_report.json", "README.md"


def report(plan: Plan, source: str, revision: str | None, command: str, checked: Verification | None) -> dict:
    """Everything that one needs to repeat or to judge the conversion. Holds no date, so that a repetition is byte-identical."""
    return {
        "source": source,
        "revision": revision,
        "command": command,
        "versions": {
            "mlx_linattn": mlx_linattn.__version__,
            "mlx": mx.__version__,
            "mlx_lm": importlib.metadata.version("mlx-lm"),
            "python": ".".join(map(str, sys.version_info[:2])),
        },
        "model_type": plan.model_type,
        "stock_mlx_lm": plan.stock_problem or "can load it",
        "parameters": plan.parameters,
        "bytes": plan.nbytes,
        "bits_per_weight": round(plan.bits_per_weight, 4),
        "tensors": [asdict(group) for group in groups(plan)],
        "reasons": dict(Counter(entry.reason for entry in plan.entries if entry.reason)),
        "kept_unchanged": sorted(plan.mtp),
        "dropped": plan.dropped,
        "verification": checked.report() if checked is not None else "not done",
    }


def card(made: dict) -> str:
    """The model card of a report."""
    source = made["source"]
    is_hub_id = source.count("/") == 1 and not source.startswith((".", "/", "~"))
    front = ["---", "library_name: mlx", "pipeline_tag: text-generation", "tags:", "- mlx"]
    front += [f"base_model: {source}"] if is_hub_id else []
    rows = [
        f"| `{g['name']}` | {g['count']} | {g['before']} | {g['after']} | {size(g['nbytes'])} |"
        for g in made["tensors"]
    ]
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    return "\n".join(
        [
            *front, "---", "", f"# {source} in MLX layout", "",
            f"{made['bits_per_weight']:.2f} bits per weight, {size(made['bytes'])}. Loads in mlx_linattn and in "
            + ("stock mlx_lm." if made["stock_mlx_lm"] == "can load it" else "mlx_lm with --trust-remote-code, if mlx-linattn is installed."), "",
            "    " + made["command"], "",
            f"With {versions}.", "", *_quality(made["verification"]), "## Tensors", "",
            "| tensor | number | before | after | size |", "|---|---|---|---|---|", *rows, "",
        ]
    )  # fmt: skip


def _quality(found) -> list[str]:
    if not isinstance(found, dict):
        return ["The result was not verified.", ""]
    lines = [
        "## Verification",
        "",
        f"All {found['tensors_checked']} tensors were read back and compared with the source.",
    ]
    q = found.get("quality")
    if q is None:
        return [*lines, f"The models were not compared on text: {found['text']}.", ""]
    lines += [
        f"Against the source on {q['tokens']} tokens of {found['text']}:", "",
        "| | |", "|---|---|",
        f"| KL divergence, mean | {q['mean_kl']:.3g} |",
        f"| KL divergence, 95 % below | {q['kl_95']:.3g} |",
        f"| KL divergence, largest | {q['max_kl']:.3g} |",
        f"| same best token | {q['top_1_agreement']:.2%} |",
        f"| perplexity, source | {q['source_perplexity']:.4g} |",
        f"| perplexity, result | {q['perplexity']:.4g} |", "",
    ]  # fmt: skip
    return lines
