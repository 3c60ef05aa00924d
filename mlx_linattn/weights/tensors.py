"""From a checkpoint's tensors to a model's parameters. Every tensor is used, or dropped for a reason, or an error."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
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
from .selection import Selection, Whole, backwards

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
        return transform.apply(take, [self._source(x, take, decoded_dtype, _of(rows)) for x in take.sources])

    def _source(self, source: str, take: Take, decoded_dtype: mx.Dtype, wanted: Selection | None = None) -> mx.array:
        """The numbers of a stored tensor for ``take``, or those that are ``wanted`` of them."""
        if take.steps and f"{source.removesuffix('.weight')}.scales" in self:
            return self._dequantized(source.removesuffix(".weight"), wanted).astype(decoded_dtype)
        encoding = self.encoding(source)
        self._used |= set(encoding.parts)
        array = encodings.decode(encoding, self.stored_parts(encoding, wanted))
        return array if encoding.kind == "plain" else array.astype(decoded_dtype)

    def stored_parts(self, encoding: encodings.Encoding, wanted: Selection | None = None) -> list[mx.array]:
        """The arrays of an encoding, or what of each is ``wanted`` of the numbers that they hold."""
        if wanted is None:
            return [self.checkpoint.read(self.stored[part]) for part in encoding.parts]
        shapes = [self.info(part).shape for part in encoding.parts]
        length = shapes[0][wanted.axis]
        if wanted.axis == len(shapes[0]) - 1:  # the only axis that can be packed
            length = encodings.decode(encoding, self.stored_parts(encoding)).shape[-1]
        blocks = encodings.blocks(encoding, shapes, wanted.axis, length)
        return [self._part(part, wanted, length, block) for part, block in zip(encoding.parts, blocks)]

    def _part(self, part: str, wanted: Selection, length: int, block: int) -> mx.array:
        """What is wanted of an axis of ``length`` entries, of a stored tensor that has one for each ``block``; 0: one for all."""
        if not block:
            return self.checkpoint.read(self.stored[part])
        return self.checkpoint.read_ranges(self.stored[part], wanted.axis, wanted.packed(length, block).ranges)

    def can_cut(self, take: Take) -> bool:
        """Whether rows of the first axis can be made without reading the others."""
        if take.steps == (("stack",),):
            return True
        encoding = self.encoding(take.sources[0])
        ndim = len(self.info(encoding.parts[0]).shape)
        return ndim > 1 and transform.keeps_rows(take, ndim) and (encoding.kind != "fp8 blocks" or ndim > 2)

    def read_part(self, name: str, wanted: Selection, decoded_dtype: mx.Dtype) -> mx.array:
        """A part of what :meth:`read` gives; no more is read than it needs. Raises Whole where that cannot be told."""
        whole = self.take(name)
        take, selections = backwards(whole, [self._source(x, whole, decoded_dtype) for x in whole.sources], wanted)
        parts = [self._source(x, whole, decoded_dtype, one) for x, one in zip(whole.sources, selections)]
        return transform.apply(take, parts)

    def make_packed(self, take: Take, rows: slice | None = None) -> list[mx.array] | None:
        """Weight and scales as MLX's mxfp4 has them, bit for bit, where the sources are mxfp4 and only rows are moved."""
        if rows is not None and take.steps == (("stack",),):
            return self.make_packed(Take(take.sources[rows], *take.steps))
        found = [self.encoding(source) for source in take.sources]
        if any(encoding.kind != "mxfp4" for encoding in found) or not transform.moves_rows(take):
            return None
        if rows is not None and not self.can_cut(take):
            return [part[rows] for part in self.make_packed(take)]
        parts = [self.stored_parts(encoding, _of(rows)) for encoding in found]
        codes = transform.apply(take, [mx.view(packed, mx.uint32) for packed, _ in parts])
        return [codes, transform.apply(take, [scales for _, scales in parts])]

    def _dequantized(self, module: str, wanted: Selection | None = None) -> mx.array:
        """The numbers of a module that MLX quantized in another shape than ours has."""
        found = quantization(self.checkpoint.config, self.family.PREFIXES)
        if found is None:
            raise CheckpointError(f"tensor {module + '.scales'!r} is there, but config.json has no quantization block")
        settings = module_settings(found, module)
        parts = [part for part in (f"{module}.{x}" for x in ("weight", "scales", "biases")) if part in self]
        self._used |= set(parts)
        if wanted is None:
            return mx.dequantize(*(self.checkpoint.read(self.stored[part]) for part in parts), **settings)
        shape = self.info(parts[0]).shape
        packed = wanted.axis == len(shape) - 1
        length = self._dequantized(module).shape[-1] if packed else shape[wanted.axis]
        blocks = [length // self._infos[part].shape[wanted.axis] for part in parts]
        return mx.dequantize(*(self._part(part, wanted, length, b) for part, b in zip(parts, blocks)), **settings)

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


def _of(rows: slice | None) -> Selection | None:
    return None if rows is None else Selection(0, ((rows.start, rows.stop),))


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


def module_settings(found: tuple[dict, dict], module: str) -> dict:
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
        return module_settings(found, place)

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
    model: Model, tensors: Tensors, names: dict[str, str | Take], decoded_dtype: mx.Dtype, share=None
) -> Iterator[tuple[str, mx.array]]:
    """Each parameter of ``model`` as a lazy array; raises CheckpointError where a shape is not what the config asks for."""
    for parameter, placeholder in tree_flatten(model.parameters()):
        take = locate(parameter, names)
        array = transform.apply(take, [tensors.read(source, decoded_dtype) for source in take.sources])
        if share is not None:
            array = transform.cut_out(array, share.cut(parameter), share.deal)
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


def load_weights(
    model: Model,
    checkpoint: Checkpoint,
    family: ModuleType,
    dtype: mx.Dtype | None = None,
    share=None,
    check: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Fill ``model`` from ``checkpoint``, lazily: nothing is read, but every name and shape is known to fit.

    ``share`` (:class:`mlx_linattn.parallel.Share`): the part of the whole model that ``model`` is. Then its weights are read
    at once, and of each tensor no more than that part, where its place in the file can be told. ``check(nbytes)`` goes before.
    """
    whole = model.spec if share is None else share.whole
    tensors, names = Tensors(checkpoint, family, whole), dict(family.names(whole))
    wide = dtype or stored_dtype(checkpoint.config)
    if checkpoint.is_mlx:
        prepare_quantized(model, tensors, names)
    pinned = float32_parameters(model)

    def finished(parameter: str, array: mx.array) -> mx.array:
        kept = mx.float32 if parameter in pinned else dtype
        if kept is not None and mx.issubdtype(array.dtype, mx.floating):
            array = array.astype(kept)
        return mx.contiguous(array)

    loaded = {name: finished(name, array) for name, array in assemble(model, tensors, names, wide, share)}
    for name, reason in tensors.leftover().items():
        log.debug("not loaded: %s (%s)", name, reason)
    checkpoint.close()
    if share is not None:
        check(sum(array.nbytes for array in loaded.values()))
        for parameter in loaded:
            array = _part(tensors, locate(parameter, names), share, parameter, wide)
            if array is not None:
                loaded[parameter] = finished(parameter, array)
            mx.eval(loaded[parameter])
        checkpoint.close()
    model.update(tree_unflatten(list(loaded.items())))


def _part(tensors: Tensors, take: Take, share, parameter: str, decoded_dtype: mx.Dtype) -> mx.array | None:
    """A rank's part of the parameter that ``take`` makes, reading no more than that; None where that cannot be done."""
    cut = share.cut(parameter)
    if cut is None or not cut.blocks:
        return None
    arrays = [tensors.read(source, decoded_dtype) for source in take.sources]
    shape = transform.apply(take, arrays).shape
    axis = len(shape) + cut.axis
    try:
        take, wanted = backwards(take, arrays, Selection(axis, tuple(cut.ranges(share.deal, shape[axis]))))
        parts = [tensors.read_part(source, one, decoded_dtype) for source, one in zip(take.sources, wanted)]
    except Whole:
        return None
    return transform.apply(take, parts)


def stored_dtype(config: dict) -> mx.Dtype:
    """The dtype that a config says the weights have; bfloat16 where it does not say."""
    for part in (config, config.get("text_config") or {}):
        name = part.get("dtype") or part.get("torch_dtype")
        if name in ("float32", "float16", "bfloat16"):
            return getattr(mx, name)
    return mx.bfloat16
