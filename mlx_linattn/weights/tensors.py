"""From a checkpoint's tensors to a model's parameters. Every tensor is used, or dropped for a reason, or an error."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import ModuleType

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from .. import arch
from ..errors import CheckpointError
from ..layout import Take, drop_reason, locate, published_sources, unprefixed
from ..model import Model
from ..spec import ModelSpec, MoeSpec
from . import encodings, transform
from .checkpoint import Checkpoint, TensorInfo

log = logging.getLogger(__name__)


class Tensors:
    """A checkpoint's tensors under their names in MLX layout, whichever layout they are stored in."""

    def __init__(self, checkpoint: Checkpoint, family: ModuleType, spec: ModelSpec):
        self.checkpoint, self.family = checkpoint, family
        self.experts = max((layer.mlp.experts for layer in spec.layers if isinstance(layer.mlp, MoeSpec)), default=0)
        self.stored = {unprefixed(name, family.PREFIXES): name for name in checkpoint.tensors}
        self.rules = (arch.earlier if checkpoint.is_mlx else arch.published)(family, spec)
        self.dropped = arch.dropped(family, spec)
        self._infos = {plain: checkpoint.tensors[name] for plain, name in self.stored.items()}
        for name in checkpoint.tensors:
            other = self.stored[unprefixed(name, family.PREFIXES)]
            if other != name:
                raise CheckpointError(
                    f"{checkpoint.folder}: holds both {name!r} and {other!r}, two names of one tensor"
                )
        self._used: set[str] = set()
        self._takes: dict[str, Take] = {}
        packed = {name.removesuffix("_packed") for name in self.stored if name.endswith("_packed")}
        self._present = self.stored.keys() | packed

    def __contains__(self, name: str) -> bool:
        return name in self.stored

    def take(self, name: str) -> Take:
        """How the tensor ``name`` of MLX layout is made from what is stored."""
        if name not in self._takes:
            self._takes[name] = published_sources(name, self.rules, self._present, self.experts)
        return self._takes[name]

    def info(self, plain: str) -> TensorInfo:
        """Header of a stored tensor, by its name without prefix."""
        return self._infos[plain]

    def encoding(self, source: str) -> encodings.Encoding:
        """How a stored tensor's numbers are written."""
        found = encodings.find(source, self._infos)
        if found is None:
            raise CheckpointError(f"tensor {source!r} is stored without the scales that its format needs")
        return found

    def read(self, name: str, decoded_dtype: mx.Dtype = mx.float32, rows: slice | None = None) -> mx.array:
        """The tensor ``name`` of MLX layout, lazily; numbers that had to be decoded come in ``decoded_dtype``.

        ``rows``: only these of its first axis.
        """
        return self.make(self.take(name), decoded_dtype, rows)

    def make(self, take: Take, decoded_dtype: mx.Dtype = mx.float32, rows: slice | None = None) -> mx.array:
        """The tensor that ``take`` makes from stored ones, or ``rows`` of it; where it can be cut, no others are read."""
        if rows is not None and take.steps == (("stack",),):
            return self.make(Take(take.sources[rows], *take.steps), decoded_dtype)
        if rows is not None and not self.can_cut(take):
            return self.make(take, decoded_dtype)[rows]
        arrays = []
        for source in take.sources:
            if take.steps and f"{source.removesuffix('.weight')}.scales" in self:
                arrays.append(self._dequantized(source.removesuffix(".weight"), rows).astype(decoded_dtype))
                continue
            encoding = self.encoding(source)
            self._used |= set(encoding.parts)
            array = encodings.decode(encoding, self.stored_parts(encoding, rows))
            arrays.append(array if encoding.kind == "plain" else array.astype(decoded_dtype))
        return transform.apply(take, arrays)

    def can_cut(self, take: Take) -> bool:
        """Whether rows of the first axis can be made without reading the others."""
        if take.steps == (("stack",),):
            return True
        encoding = self.encoding(take.sources[0])
        ndim = len(self.info(encoding.parts[0]).shape)
        return ndim > 1 and transform.keeps_rows(take, ndim) and (encoding.kind != "fp8 blocks" or ndim > 2)

    def stored_parts(self, encoding: encodings.Encoding, rows: slice | None = None) -> list[mx.array]:
        """The arrays of an encoding; of those that have a row for each row of the weight, only ``rows``."""
        shapes = [self.info(part).shape for part in encoding.parts]
        cut = [rows if shape[:1] == shapes[0][:1] else None for shape in shapes]
        return [self.checkpoint.read(self.stored[part], some) for part, some in zip(encoding.parts, cut)]

    def make_packed(self, take: Take, rows: slice | None = None) -> list[mx.array] | None:
        """Weight and scales as MLX's mxfp4 has them, bit for bit, where the sources are mxfp4 and only rows are moved."""
        if rows is not None and take.steps == (("stack",),):
            return self.make_packed(Take(take.sources[rows], *take.steps))
        found = [self.encoding(source) for source in take.sources]
        if any(encoding.kind != "mxfp4" for encoding in found) or not transform.moves_rows(take):
            return None
        if rows is not None and not self.can_cut(take):
            return [part[rows] for part in self.make_packed(take)]
        parts = [self.stored_parts(encoding, rows) for encoding in found]
        codes = transform.apply(take, [mx.view(packed, mx.uint32) for packed, _ in parts])
        return [codes, transform.apply(take, [scales for _, scales in parts])]

    def _dequantized(self, module: str, rows: slice | None) -> mx.array:
        """The numbers of a module that MLX quantized in another shape than ours has."""
        found = quantization(self.checkpoint.config, self.family.PREFIXES)
        if found is None:
            raise CheckpointError(f"tensor {module + '.scales'!r} is there, but config.json has no quantization block")
        settings = _settings(found, module)
        parts = [part for part in (f"{module}.{x}" for x in ("weight", "scales", "biases")) if part in self]
        self._used |= set(parts)
        return mx.dequantize(*(self.checkpoint.read(self.stored[part], rows) for part in parts), **settings)

    def leftover(self) -> dict[str, str]:
        """Stored tensors that nothing used, with the reason why not; raises CheckpointError where there is none."""
        dropped = {}
        for plain, name in self.stored.items():
            if plain in self._used:
                continue
            reason = drop_reason(plain, self.dropped)
            if reason is None and encodings.ACTIVATION_SCALE.match(plain):
                reason = "scale for quantised activations, which are not used here"
            if reason is None and encodings.COMPANION.match(plain):
                raise CheckpointError(
                    f"{self.checkpoint.folder}: {name!r} is a part of a quantized weight, but the other parts are missing or "
                    "in a format that this version does not know"
                )
            if reason is None:
                raise CheckpointError(
                    f"{self.checkpoint.folder}: tensor {name!r} is used by nothing in a {self.checkpoint.config['model_type']} model; "
                    "the checkpoint and its config.json do not belong together, or this version does not know the tensor"
                )
            dropped[name] = reason
        return dropped


def quantization(config: dict, prefixes=()) -> tuple[dict, dict[str, dict | bool]] | None:
    """The (default, overrides by module) of a config in MLX layout, or None where nothing is quantized."""
    block = config.get("quantization") or config.get("quantization_config")
    if not isinstance(block, dict) or "group_size" not in block or "bits" not in block:
        return None
    default = {key: block[key] for key in ("group_size", "bits")} | {"mode": block.get("mode", "affine")}
    overrides = {
        unprefixed(f"{path}.", prefixes)[:-1]: value for path, value in block.items() if isinstance(value, (dict, bool))
    }
    return default, overrides


def _settings(found: tuple[dict, dict], module: str) -> dict:
    """How one module is quantized. An override that names no mode means affine, whatever the default's mode is."""
    default, overrides = found
    wanted = overrides.get(module)
    return {**default, "mode": "affine", **wanted} if isinstance(wanted, dict) else default


def prepare_quantized(model: Model, tensors: Tensors, names: dict[str, str | Take]) -> None:
    """Turn those modules quantized whose scales are in the checkpoint."""
    found = quantization(tensors.checkpoint.config, tensors.family.PREFIXES)

    def choose(path: str, module: nn.Module):
        if not hasattr(module, "to_quantized"):
            return False
        place = locate(path, names).sources[0]
        if f"{place}.scales" not in tensors:
            return False
        if found is None:
            raise CheckpointError(f"tensor {place + '.scales'!r} is there, but config.json has no quantization block")
        return _settings(found, place)

    nn.quantize(model, class_predicate=choose)


def float32_parameters(model: Model) -> set[str]:
    """Parameters that stay float32 whatever dtype a model is loaded in."""
    return {
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name in getattr(module, "float32", ())
        if name in module
    }


def assemble(
    model: Model, tensors: Tensors, names: dict[str, str | Take], decoded_dtype: mx.Dtype
) -> Iterator[tuple[str, mx.array]]:
    """Each parameter of ``model`` as a lazy array; raises CheckpointError where a shape is not what the config asks for."""
    for parameter, placeholder in tree_flatten(model.parameters()):
        take = locate(parameter, names)
        array = transform.apply(take, [tensors.read(source, decoded_dtype) for source in take.sources])
        if array.shape != placeholder.shape:
            raise CheckpointError(
                f"{tensors.checkpoint.folder}: tensor {take.sources[0]!r} gives shape {list(array.shape)}, "
                f"but config.json asks for {list(placeholder.shape)}"
            )
        if mx.issubdtype(array.dtype, mx.floating) != mx.issubdtype(placeholder.dtype, mx.floating):
            raise CheckpointError(
                f"{tensors.checkpoint.folder}: tensor {take.sources[0]!r} holds {str(array.dtype).split('.')[-1]} numbers "
                "in a format that this version does not know"
            )
        yield parameter, array


def load_weights(model: Model, checkpoint: Checkpoint, family: ModuleType, dtype: mx.Dtype | None = None) -> None:
    """Fill ``model`` from ``checkpoint``, lazily: nothing is read, but every name and shape is known to fit."""
    tensors = Tensors(checkpoint, family, model.spec)
    names = dict(family.names(model.spec))
    if checkpoint.is_mlx:
        prepare_quantized(model, tensors, names)
    pinned = float32_parameters(model)
    loaded = {}
    for parameter, array in assemble(model, tensors, names, dtype or stored_dtype(checkpoint.config)):
        if parameter in pinned:
            array = array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array
        elif dtype is not None and mx.issubdtype(array.dtype, mx.floating):
            array = array.astype(dtype)
        loaded[parameter] = mx.contiguous(array)
    for name, reason in tensors.leftover().items():
        log.debug("not loaded: %s (%s)", name, reason)
    checkpoint.close()
    model.update(tree_unflatten(list(loaded.items())))


def stored_dtype(config: dict) -> mx.Dtype:
    """The dtype that a config says the weights have; bfloat16 where it does not say."""
    for part in (config, config.get("text_config") or {}):
        name = part.get("dtype") or part.get("torch_dtype")
        if name in ("float32", "float16", "bfloat16"):
            return getattr(mx, name)
    return mx.bfloat16
