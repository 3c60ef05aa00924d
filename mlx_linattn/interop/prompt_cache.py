"""States from mlx_lm's prompt-cache files, for the layers that both libraries keep in the same layout.

Those are attention's keys and values, and gated-delta layers: [B, K-1, C] inputs of the convolution and a matrix
[B, Hv, Dv, Dk] (Qwen3-Next, Qwen3.5 and their kin). Other layers are kept differently, and such files are refused. The files
hold neither tokens nor a fingerprint of the model: that they belong together is the caller's word, as it is in mlx_lm.
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from ..errors import SessionFileError
from ..model import Model
from ..spec import AttentionSpec, GatedDeltaSpec
from ..state import KVState, ModelState
from .door import mlx_lm

SAME = {GatedDeltaSpec: "ArraysCache", AttentionSpec: "KVCache"}  # by mixer, mlx_lm's class with our layout


def load_prompt_cache(path: str | Path, model: Model) -> ModelState:
    """The state in the file that ``mlx_lm.models.cache.save_prompt_cache`` wrote.

    Raises SessionFileError where it cannot be read, or holds what this model has no place for.
    """
    try:
        caches = mlx_lm("models.cache").load_prompt_cache(str(path))
    except Exception as error:  # mlx_lm raises what its parts raise
        raise SessionFileError(f"{path}: is not a prompt cache that mlx_lm can read ({error})") from error
    state = model.make_cache()
    if len(caches) != len(state):
        raise SessionFileError(f"{path}: holds {len(caches)} layers, the model has {len(state)}: it is another model's")
    lengths = {cache.offset for cache in caches if hasattr(cache, "offset")}
    if len(lengths) != 1 or not min(lengths):
        raise SessionFileError(f"{path}: does not say how many tokens it holds: no attention layer tells")
    length = lengths.pop()
    probe = model.rehearse(state)
    layers = []
    for i, (cache, layer, expected) in enumerate(zip(caches, state, probe)):
        kind = type(cache).__name__
        if kind != SAME.get(type(model.spec.layers[i].mixer)):
            raise SessionFileError(f"{path}: layer {i} is a {kind}, which is kept in another layout here")
        attends = isinstance(layer, KVState)
        arrays = [cache.keys[:, :, :length], cache.values[:, :, :length]] if attends else list(cache.cache)
        shapes = [_shape(array, layer) for array in arrays], [_shape(array, layer) for array in expected.state]
        if shapes[0] != shapes[1]:
            raise SessionFileError(
                f"{path}: layer {i} holds {shapes[0]}, the model expects {shapes[1]}: it is another model's"
            )
        layers.append([array.astype(like.dtype) for array, like in zip(arrays, expected.state)])
    state.load(layers, length)
    mx.eval(state.arrays)
    return state


def _shape(array: mx.array, layer) -> list[int]:
    """Without the number of columns, which is the context's."""
    return [*array.shape[:2], *array.shape[3:]] if isinstance(layer, KVState) else list(array.shape)
