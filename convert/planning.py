"""From a checkpoint's headers, its config and what was asked for to a plan. Reads no numbers."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_linattn import arch
from mlx_linattn.errors import ConvertError, RequestError
from mlx_linattn.layout import Take, locate, unprefixed
from mlx_linattn.model import Model
from mlx_linattn.weights import Tensors, assemble, prepare_quantized, stored_dtype
from mlx_linattn.weights.checkpoint import Checkpoint

from .bits import BALANCED, Choice, Quantization, Rule, choose
from .plan import CODES, MTP_FILE, Entry, Options, Plan

MTP = re.compile(r"mtp\..*")
MXFP4 = Quantization.make(mode="mxfp4")  # published weights of this format are MLX's, bit for bit
# Few numbers, all of which pass through exp or decide a choice.
FLOAT32 = re.compile(r".*\.(A_log|dt_bias|D|e_score_correction_bias|expert_bias)")


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
    model_type = family.MLX_TYPES.get(spec.model_type, spec.model_type)
    config = family.mlx_config(checkpoint.config) if hasattr(family, "mlx_config") else checkpoint.config
    problem = ""
    if not known_to_mlx_lm(model_type):
        problem = f"stock mlx_lm does not know {model_type!r}"
    elif config is None:
        problem = "stock mlx_lm cannot express this config"
    return Plan(config or checkpoint.config, model_type, problem, entries, mtp, dropped), tensors


def known_to_mlx_lm(model_type: str) -> bool:
    """Whether stock mlx_lm has a file for this type, under its own name or another. Importing mlx_lm to ask would take a second."""
    package = importlib.util.find_spec("mlx_lm")
    if package is None or not package.submodule_search_locations:
        return False
    place = Path(package.submodule_search_locations[0])
    name = _other_names(place / "utils.py").get(model_type, model_type)
    return (place / "models" / f"{name}.py").is_file()


def _other_names(file: Path) -> dict[str, str]:
    """mlx_lm's own table of types that share a file, read off its source."""
    with contextlib.suppress(OSError, ValueError, SyntaxError):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and any(getattr(t, "id", None) == "MODEL_REMAPPING" for t in node.targets):
                return ast.literal_eval(node.value)
    return {}


@dataclass(frozen=True)
class _Weight:
    """A weight that can be quantized."""

    now: Quantization | None
    raised: str  # why the balanced recipe gives it a step of bits more


def _weights(model: Model, names) -> dict[str, _Weight]:
    """By name in MLX layout."""
    found = {}
    for path, module in model.named_modules():
        is_quantized = "scales" in module
        if is_quantized or hasattr(module, "to_quantized"):
            now = Quantization(module.bits, module.group_size, module.mode) if is_quantized else None
            found |= dict.fromkeys(locate(f"{path}.weight", names).sources, _Weight(now, _raised(path, model)))
    return found


def _raised(path: str, model: Model) -> str:
    if path in ("embed", "head"):
        return "head or embedding: every token passes through it"
    mixer = re.match(r"layers\.(\d+)\.mixer\.", path)
    # Where a layer is nothing but its mixer, that is the bulk of the weights.
    if mixer and model.spec.layers[int(mixer.group(1))].mlp is not None:
        return "mixer: it carries the memory"
    return ""


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


def _entry(name: str, tensors: Tensors, weights: dict[str, _Weight], history, options: Options) -> Entry:
    take, was = tensors.take(name), weights[name].now if name in weights else None
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
        raised = weights[name].raised if options.recipe == BALANCED else ""
        chosen = choose(module, shape, options.quantization, family.QUANTIZE, raised)
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
