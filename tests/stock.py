"""Stock mlx_lm on the same weights: what we read must be what it reads, and what it writes must load here."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
from helpers import golden, largest_difference, stock_load
from mlx.utils import tree_flatten

from mlx_linattn.arch import family
from mlx_linattn.interop.door import mlx_lm
from mlx_linattn.layout import locate
from mlx_linattn.model import Model
from mlx_linattn.weights import Tensors
from mlx_linattn.weights.checkpoint import Checkpoint


def stock_model(folder):
    """The folder's model as stock mlx_lm loads it."""
    return stock_load(folder, trust=False)[0]


def our_layout(folder) -> dict:
    """Every tensor that we read of a published checkpoint, under its name in MLX layout."""
    checkpoint = Checkpoint(folder)
    module = family(checkpoint.config)
    spec = module.spec(checkpoint.config)
    tensors, names = Tensors(checkpoint, module, spec), dict(module.names(spec))
    places = {source for path, _ in tree_flatten(Model(spec).parameters()) for source in locate(path, names).sources}
    return {place: tensors.read(place) for place in places}


def convert(source: Path, target: Path, quantize: dict | None = None) -> Path:
    """A folder as stock mlx_lm converts it, quantized with the arguments of its quantize_model."""
    utils = mlx_lm("utils")
    model, config = stock_load(source, trust=False)
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
