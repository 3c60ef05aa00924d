"""Models of this library as stock mlx_lm takes them, for model types that mlx_lm does not know.

A converted folder of such a type holds a ``modeling_mlx.py`` that imports ``Model`` and ``ModelArgs`` from here, and names
it in config.json's ``model_file``; mlx_lm runs it when it is told to trust remote code.
"""

from __future__ import annotations

import mlx.core as mx
from mlx.utils import tree_flatten

from .. import model
from ..arch import family
from ..layout import locate, unprefixed
from ..weights import float32_parameters, transform


class ModelArgs:
    """A config as it is."""

    def __init__(self, config: dict):
        self.config = config

    @classmethod
    def from_dict(cls, config: dict) -> ModelArgs:
        return cls(config)


class Model(model.Model):
    def __init__(self, args: ModelArgs):
        super().__init__(family(args.config).spec(args.config))
        self.args = args

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Tensors of MLX layout under the names of this library's parameters."""
        module = family(self.args.config)
        names = dict(module.names(self.spec))
        stored = {unprefixed(name, module.PREFIXES): array for name, array in weights.items()}
        pinned = float32_parameters(self)
        result = {}
        for parameter, _ in tree_flatten(self.parameters()):
            base = parameter.removesuffix(".weight")
            for name in dict.fromkeys((parameter, f"{base}.scales", f"{base}.biases")):
                take = locate(name, names)
                if all(source in stored for source in take.sources):
                    array = transform.apply(take, [stored[source] for source in take.sources])
                    is_pinned = name in pinned and mx.issubdtype(array.dtype, mx.floating)
                    result[name] = array.astype(mx.float32) if is_pinned else array
        return result
