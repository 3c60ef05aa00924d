"""Stock mlx_lm on the same weights: what we read must be what it reads, and what it writes must load here."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
from helpers import golden, largest_difference

from mlx_linattn.interop.door import mlx_lm


def load(folder: Path):
    """The (model, config) that stock mlx_lm makes of a folder."""
    return mlx_lm("utils").load_model(Path(folder))


def convert(source: Path, target: Path, quantize: dict | None = None) -> Path:
    """A folder as stock mlx_lm converts it, quantized with the arguments of its quantize_model."""
    utils = mlx_lm("utils")
    model, config = load(source)
    if quantize is not None:
        model, config = utils.quantize_model(model, config, **quantize)
    utils.save_model(target, model)
    utils.save_config(config, Path(target) / "config.json")
    return Path(target)


def difference(ours, theirs, name: str) -> float:
    """The largest difference of two models' logits on a fixture's tokens: prefilled, then one token at a time."""
    want = golden(name)
    ids, steps = mx.array(want["input_ids"]), mx.array(want["decode_ids"])
    logits = []
    for model in (ours, theirs):
        cache = model.make_cache()
        parts = [model(ids, cache)] + [model(steps[:, i : i + 1], cache) for i in range(steps.shape[1])]
        logits.append(np.array(mx.concatenate(parts, axis=1).astype(mx.float32)))
    return largest_difference(*logits)
