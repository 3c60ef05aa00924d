"""What a conversion does to each tensor, decided before any number is read. Pure data, made from headers and config."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_linattn import arch
from mlx_linattn.checkpoint import ITEM_BITS, Checkpoint, TensorInfo
from mlx_linattn.errors import ConvertError, RequestError
from mlx_linattn.layout import Take, locate, unprefixed
from mlx_linattn.model import Model
from mlx_linattn.weights import Tensors, assemble, prepare_quantized, stored_dtype

from .bits import BALANCED, Choice, Quantization, Rule, choose

MTP_FILE = "mtp.safetensors"  # not model*.safetensors: mlx_lm would take it for a shard
MTP = re.compile(r"mtp\..*")
MXFP4 = Quantization.make(mode="mxfp4")  # published weights of this format are MLX's, bit for bit
# Few numbers, all of which pass through exp or decide a choice.
FLOAT32 = re.compile(r".*\.(A_log|dt_bias|D|e_score_correction_bias|expert_bias)")
CODES = {mx.float32: "F32", mx.bfloat16: "BF16", mx.float16: "F16", mx.uint32: "U32", mx.uint8: "U8"}
DTYPES = {code: dtype for dtype, code in CODES.items()}


@dataclass(frozen=True)
class Options:
    """What the user asked for."""

    quantization: Quantization | None = None
    recipe: str = BALANCED
    rules: tuple[Rule, ...] = ()  # the first that matches decides, before the recipe
    dequantize: bool = False
    dtype: str | None = None  # such as "BF16"; None: what the config says, or in MLX layout what is stored
    keep_mtp: bool = False


@dataclass(frozen=True)
class Output:
    """One tensor as it will lie on disk."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BITS[self.dtype] // 8


@dataclass(frozen=True)
class Entry:
    """One tensor of MLX layout: where it comes from and what it becomes."""

    name: str  # in MLX layout, without outer prefix
    target: str  # on disk
    take: Take  # from stored tensors
    shape: tuple[int, ...]  # of the numbers, not of their packed form
    encoding: str  # of the source, see encodings.py
    before: str  # dtype or bits, for people
    dtype: str  # of the numbers in the result, or of their scales
    was: Quantization | None = None  # where the source is quantized as MLX does it
    quantization: Quantization | None = None
    reason: str = ""  # why it is not quantized as asked
    made: str = ""  # what was done to the numbers besides rounding, in this conversion and before it

    @property
    def parameters(self) -> int:
        return math.prod(self.shape)

    @property
    def module(self) -> str:
        return self.target.removesuffix(".weight")

    @property
    def copied(self) -> bool:
        """Whether MLX-quantized numbers go over bit for bit."""
        return self.was is not None and self.was == self.quantization

    @property
    def outputs(self) -> tuple[Output, ...]:
        q = self.quantization
        if q is None:
            return (Output(self.target, self.dtype, self.shape),)
        *rows, row = self.shape
        groups = (*rows, row // q.group_size)
        packed = Output(self.target, "U32", (*rows, row * q.bits // 32))
        if q.mode != "affine":
            return packed, Output(f"{self.module}.scales", "U8", groups)
        return packed, *(Output(f"{self.module}.{part}", self.dtype, groups) for part in ("scales", "biases"))

    @property
    def nbytes(self) -> int:
        return sum(output.nbytes for output in self.outputs)


@dataclass(frozen=True)
class Plan:
    model_type: str  # in the result
    entries: tuple[Entry, ...]
    mtp: dict[str, TensorInfo]  # kept unchanged in a file of their own
    dropped: dict[str, str]  # stored tensor -> reason

    @property
    def parameters(self) -> int:
        return sum(entry.parameters for entry in self.entries)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries) + sum(info.nbytes for info in self.mtp.values())

    @property
    def bits_per_weight(self) -> float:
        return 8 * sum(entry.nbytes for entry in self.entries) / self.parameters

    def shards(self, limit: int) -> list[tuple[Entry, ...]]:
        """The entries, in order, in files of at most ``limit`` bytes each (a larger tensor has a file of its own)."""
        shards: list[list[Entry]] = []
        room = 0
        for entry in self.entries:
            if not shards or entry.nbytes > room:
                shards.append([])
                room = limit
            shards[-1].append(entry)
            room -= entry.nbytes
        return [tuple(shard) for shard in shards]


def make_plan(checkpoint: Checkpoint, options: Options) -> tuple[Plan, Tensors]:
    """The plan, and the reader that carries it out. Raises CheckpointError where anything is missing, unknown or misshapen."""
    family = arch.family(checkpoint.config)
    spec = family.spec(checkpoint.config)
    tensors = Tensors(checkpoint, family, spec)
    model, names = Model(spec), dict(family.names(spec))
    if checkpoint.is_mlx:
        prepare_quantized(model, tensors, names)
    for _ in assemble(model, tensors, names, mx.float32):
        pass  # every name and shape fits
    weights = _weights(model, names)
    history = _history(checkpoint, family)
    entries = tuple(_entry(name, tensors, weights, history, options) for name in _needed(model, names))
    _check_rules(options.rules, entries, weights)
    dropped = tensors.leftover()
    mtp = {}
    if options.keep_mtp:
        mtp = {name: checkpoint.tensors[name] for name in dropped if MTP.fullmatch(name)}
        dropped = {name: reason for name, reason in dropped.items() if name not in mtp}
        if not mtp and not (checkpoint.folder / MTP_FILE).exists():
            raise ConvertError(f"{checkpoint.folder}: has no multi-token-prediction head to keep")
    checkpoint.close()
    return Plan(mlx_type(family, spec.model_type), entries, mtp, dropped), tensors


def mlx_type(family: ModuleType, model_type: str) -> str:
    """The model_type under which stock mlx_lm knows a model."""
    return family.MLX_TYPES.get(model_type, model_type)


def _weights(model: Model, names) -> dict[str, Quantization | None]:
    """Weights that can be quantized, by name in MLX layout, and how they are now."""
    found = {}
    for path, module in model.named_modules():
        is_quantized = "scales" in module
        if is_quantized or hasattr(module, "to_quantized"):
            now = Quantization(module.bits, module.group_size, module.mode) if is_quantized else None
            found |= dict.fromkeys(locate(f"{path}.weight", names).sources, now)
    return found


def _needed(model: Model, names) -> Iterator[str]:
    """Tensors of MLX layout that the model is made from, scales and biases of quantized ones not counted."""
    seen = set()
    for parameter, _ in tree_flatten(model.parameters()):
        for name in locate(parameter, names).sources:
            if name not in seen and not name.endswith((".scales", ".biases")):
                seen.add(name)
                yield name


def _history(checkpoint: Checkpoint, family: ModuleType) -> dict[str, str]:
    """What an earlier conversion by this program says that it did to each tensor, by name in MLX layout."""
    made = {}
    for metadata in checkpoint.metadata:
        with contextlib.suppress(ValueError, AttributeError):
            made |= json.loads(metadata.get("mlx_linattn", "{}")).get("made", {})
    return {unprefixed(name, family.PREFIXES): text for name, text in made.items()}


def _entry(name: str, tensors: Tensors, weights: dict[str, Quantization | None], history, options: Options) -> Entry:
    take, was = tensors.take(name), weights.get(name)
    array = tensors.make(take)
    encoding = tensors.encoding(take.sources[0])
    shape = array.shape
    if name in weights and tensors.make_packed(take) is not None:
        was, before, dtype = MXFP4, str(MXFP4), "U8"
    elif was is not None:
        shape = (*shape[:-1], shape[-1] * 32 // was.bits)
        before, dtype = str(was), CODES[tensors.read(f"{name.removesuffix('.weight')}.scales").dtype]
    else:
        stored = tensors.info(encoding.parts[0]).dtype
        before, dtype = (stored if encoding.kind == "plain" else encoding.kind), stored
    target = tensors.family.MLX_PREFIX + name
    chosen = _choice(target, name, shape, was, weights, tensors.family, options)
    return Entry(
        name=name,
        target=target,
        take=take,
        shape=shape,
        encoding=encoding.kind,
        before=before,
        dtype=chosen.dtype or _dtype(name, dtype, array.dtype, tensors, options),
        was=was,
        quantization=chosen.quantization,
        reason=chosen.reason,
        made=", ".join(
            part for part in (history.get(name, ""), _made(take, "plain" if was else encoding.kind)) if part
        ),
    )


def _made(take: Take, encoding: str) -> str:
    """Such as "decode fp8 blocks, stack"."""
    steps = [] if encoding == "plain" else [f"decode {encoding}"]
    return ", ".join(steps + [" ".join(str(part) for part in step) for step in take.steps])


def _choice(target, name, shape, was, weights, family, options: Options) -> Choice:
    if name not in weights or options.dequantize:
        return Choice(None)
    rule = _rule(target, options.rules)
    if rule is not None:
        chosen = rule.choose(shape)
    elif options.quantization is not None:
        module = name.removesuffix(".weight")
        chosen = choose(module, shape, options.quantization, family.QUANTIZE, options.recipe)
    else:
        return Choice(was)
    if was is not None and (chosen.quantization is None or chosen.quantization.bits > was.bits):
        return Choice(was, f"stored in {was.bits} bits; more bits would bring nothing back")
    return chosen


def _rule(target: str, rules: tuple[Rule, ...]) -> Rule | None:
    return next((rule for rule in rules if rule.pattern.search(target)), None)


def _check_rules(rules: tuple[Rule, ...], entries: tuple[Entry, ...], weights) -> None:
    used = {_rule(entry.target, rules) for entry in entries if entry.name in weights}
    for rule in rules:
        if rule not in used:
            raise RequestError(
                f"rule {rule.text!r} matches no weight that can be quantized, or none that earlier rules left; "
                "--dry-run lists the names"
            )


def _dtype(name, stored: str, made: mx.Dtype, tensors: Tensors, options: Options) -> str:
    """The dtype of numbers that are not quantized, and of the scales of those that are."""
    is_float = stored in ("F32", "F16", "BF16")
    if not is_float and made in (mx.int32, mx.int64):
        return stored
    if options.dtype is None and tensors.checkpoint.is_mlx and is_float:
        return stored
    if FLOAT32.fullmatch(name):
        return "F32"
    return options.dtype or CODES[stored_dtype(tensors.checkpoint.config)]
