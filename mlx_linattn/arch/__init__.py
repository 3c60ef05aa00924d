"""One file a model family. A family module has

    MODEL_TYPES   the ``model_type`` values of config.json it answers for
    spec(config)  the model as a ModelSpec; raises CheckpointError where the config says something it does not know
    names(spec)   where each parameter lies in a checkpoint of MLX layout
    PUBLISHED     how published checkpoints differ from that layout
    DROPPED       tensors that a text model has no use for, and why
    QUANTIZE      which weights stay as they are or need more bits
    MLX_TYPES     model_type -> the name under which stock mlx_lm knows it
    MLX_PREFIX    what stock mlx_lm puts before every name;  PREFIXES  what others put there

and, where it needs them,

    ARCHITECTURES       values of ``architectures`` it answers for, where another family has the same model_type
    published(spec)     rules like PUBLISHED that depend on the model's sizes; they come before those
    dropped(spec)       the same for DROPPED
    mlx_config(config)  the config in stock mlx_lm's words, or None where those do not suffice
    earlier(spec)       how older releases of mlx_lm wrote MLX layout, as rules like PUBLISHED

and imports only ``spec``, ``layout`` and ``errors``. To add a family, write one such file and its test.
"""

from __future__ import annotations

import difflib
from types import ModuleType

from ..errors import CheckpointError, UnsupportedModelError
from ..layout import Published
from ..spec import ModelSpec
from . import (
    bailing_linear,
    bailing_v3,
    bailing_v25,
    fla,
    jamba,
    kimi_k3,
    kimi_linear,
    mamba,
    minimax,
    olmo_hybrid,
    qwen3_5,
    qwen3_next,
    recurrent_gemma,
)

FAMILIES = (
    qwen3_next,
    qwen3_5,
    kimi_linear,
    kimi_k3,
    olmo_hybrid,
    bailing_v3,
    bailing_v25,
    bailing_linear,
    minimax,
    recurrent_gemma,
    jamba,
    mamba,
    fla,
)


def family(config: dict) -> ModuleType:
    """The family module for a config.json; raises UnsupportedModelError with the nearest known name."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError("config.json has no model_type: it is not a language model's config")
    known = {name for module in FAMILIES for name in module.MODEL_TYPES}
    if model_type not in known:
        nearest = difflib.get_close_matches(model_type, known, n=1, cutoff=0)
        raise UnsupportedModelError(
            f"model_type {model_type!r} is not known; the nearest known one is {nearest[0]!r} (known: {', '.join(sorted(known))})"
        )
    named, served = config.get("architectures") or [], []
    for module in FAMILIES:
        if model_type not in module.MODEL_TYPES:
            continue
        wanted = getattr(module, "ARCHITECTURES", None)
        if wanted is None or any(name in wanted for name in named):
            return module
        served += wanted
    raise UnsupportedModelError(
        f"model_type {model_type!r} has several architectures, and config.json names {named or 'none'}; known: {', '.join(served)}"
    )


def published(module: ModuleType, spec: ModelSpec) -> tuple[Published, ...]:
    """How the published checkpoints of a family differ from MLX layout, for a model of these sizes."""
    sized = getattr(module, "published", None)
    return (*(sized(spec) if sized else ()), *module.PUBLISHED)


def earlier(module: ModuleType, spec: ModelSpec) -> tuple[Published, ...]:
    """How older releases of mlx_lm wrote the MLX layout of a family, for a model of these sizes."""
    sized = getattr(module, "earlier", None)
    return sized(spec) if sized else ()


def dropped(module: ModuleType, spec: ModelSpec) -> tuple[tuple[str, str], ...]:
    """Tensors that a model of these sizes has no use for, and why."""
    sized = getattr(module, "dropped", None)
    return (*(sized(spec) if sized else ()), *module.DROPPED)
