"""Models of this library as stock mlx_lm takes them, for model types that mlx_lm does not know.

Either :func:`register` puts them among mlx_lm's models, or a converted folder holds a ``modeling_mlx.py`` that imports
``Model`` and ``ModelArgs`` from here and is named in config.json's ``model_file``; mlx_lm runs it when it is told to trust
remote code.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from .. import model
from ..arch import FAMILIES, family
from ..layout import locate, unprefixed
from ..weights import TensorInfo, Tensors, assemble, float32_parameters, stored_dtype, transform
from .door import mlx_lm
from .stock_cache import ModelStateCache

NAME = "mlx_linattn"  # of this module among mlx_lm's models
DTYPES = {mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16", mx.uint8: "U8"}  # as a file's header spells them


def register() -> list[str]:
    """As :func:`mlx_linattn.interop.register`."""
    utils, models, cache = mlx_lm("utils"), mlx_lm("models"), mlx_lm("models.cache")
    known = utils.MODEL_REMAPPING
    here = f"{models.__name__}.{NAME}"

    def has(name: str) -> bool:
        return known.get(name) != NAME and find_spec(f"{models.__name__}.{known.get(name, name)}") is not None

    lacking = sorted(
        name
        for module in FAMILIES
        for name in module.MODEL_TYPES
        if not has(name) and not has(module.MLX_TYPES.get(name, name))
    )
    sys.modules[here] = sys.modules[__name__]  # where mlx_lm imports it from
    setattr(models, NAME, sys.modules[__name__])
    setattr(cache, ModelStateCache.__name__, ModelStateCache)  # where it looks up the class of a cache in a file
    known.update(dict.fromkeys(lacking, NAME))
    return lacking


class ModelArgs:
    """A config as it is."""

    def __init__(self, config: dict):
        self.config = config
        self.model_type = config["model_type"]

    @classmethod
    def from_dict(cls, config: dict) -> ModelArgs:
        return cls(config)


class Model(model.Model):
    def __init__(self, args: ModelArgs):
        super().__init__(family(args.config).spec(args.config))
        self.args = args

    def make_cache(self, *options) -> list[ModelStateCache]:
        return [ModelStateCache(super().make_cache(*options), self)]

    def __call__(self, ids, cache: list[ModelStateCache] | None = None):
        """Logits [B, T, V] of ``ids`` [B, T], read after what the one entry of ``cache`` holds."""
        (one,) = self.make_cache() if cache is None else cache
        return one.read(self, mx.array(ids))

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """A checkpoint's tensors under the names of this library's parameters.

        What our converter wrote is in MLX layout, and of these types nothing else is: its configs name a ``model_file``.
        """
        module = family(self.args.config)
        names = dict(module.names(self.spec))
        pinned = float32_parameters(self)
        found = (
            self._ours(weights, module, names)
            if "model_file" in self.args.config
            else self._published(weights, module, names)
        )
        return {
            name: array.astype(mx.float32) if name in pinned and mx.issubdtype(array.dtype, mx.floating) else array
            for name, array in found
        }

    def _published(self, weights, module, names):
        tensors = Tensors(_Loaded(self.args.config, weights), module, self.spec)
        yield from assemble(self, tensors, names, stored_dtype(self.args.config))
        tensors.leftover()

    def _ours(self, weights, module, names):
        stored = {unprefixed(name, module.PREFIXES): array for name, array in weights.items()}
        for parameter, _ in tree_flatten(self.parameters()):
            base = parameter.removesuffix(".weight")
            for name in dict.fromkeys((parameter, f"{base}.scales", f"{base}.biases")):
                take = locate(name, names)
                if all(source in stored for source in take.sources):
                    yield name, transform.apply(take, [stored[source] for source in take.sources])


class _Loaded:
    """A published checkpoint whose tensors mlx_lm has read already."""

    is_mlx = False

    def __init__(self, config: dict, weights: dict[str, mx.array]):
        self.folder, self.config, self.weights = Path("this checkpoint"), config, weights
        self.tensors = {
            name: TensorInfo(self.folder, DTYPES.get(array.dtype, str(array.dtype)), tuple(array.shape))
            for name, array in weights.items()
        }

    def read(self, name: str) -> mx.array:
        return self.weights[name]
