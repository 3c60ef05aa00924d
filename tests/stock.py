"""What stock mlx_lm makes of a published checkpoint, to hold our MLX layout against."""

from __future__ import annotations

from mlx.utils import tree_flatten

from mlx_linattn.arch import family
from mlx_linattn.checkpoint import Checkpoint
from mlx_linattn.interop.door import mlx_lm
from mlx_linattn.layout import locate
from mlx_linattn.model import Model
from mlx_linattn.weights import Tensors


def stock_model(folder):
    """The folder's model as stock mlx_lm loads it."""
    return mlx_lm("utils").load_model(folder)[0]


def our_layout(folder) -> dict:
    """Every tensor that we read of a published checkpoint, under its name in MLX layout."""
    checkpoint = Checkpoint(folder)
    module = family(checkpoint.config)
    spec = module.spec(checkpoint.config)
    tensors, names = Tensors(checkpoint, module, spec), dict(module.names(spec))
    places = {source for path, _ in tree_flatten(Model(spec).parameters()) for source in locate(path, names).sources}
    return {place: tensors.read(place) for place in places}
