"""One file a model family. A family module has

    MODEL_TYPES   the ``model_type`` values of config.json it answers for
    spec(config)  the model as a ModelSpec; raises CheckpointError where the config says something it does not know
    names(spec)   where each parameter lies in a checkpoint of MLX layout
    PUBLISHED     how published checkpoints differ from that layout
    DROPPED       tensors that a text model has no use for, and why
    QUANTIZE      which weights stay as they are or need more bits
    MLX           how stock mlx_lm wants the result: model_type and name prefix

and imports only ``spec``, ``layout`` and ``errors``. To add a family, write one such file and its test.
"""

from __future__ import annotations

import difflib
from types import ModuleType

from ..errors import CheckpointError, UnsupportedModelError
from . import bailing_linear, minimax, qwen3_5, qwen3_next

FAMILIES = (qwen3_next, qwen3_5, minimax, bailing_linear)


def family(config: dict) -> ModuleType:
    """The family module for a config.json; raises UnsupportedModelError with the nearest known name."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError("config.json has no model_type: it is not a language model's config")
    known = {name: module for module in FAMILIES for name in module.MODEL_TYPES}
    if model_type in known:
        return known[model_type]
    nearest = difflib.get_close_matches(model_type, known, n=1, cutoff=0)
    raise UnsupportedModelError(
        f"model_type {model_type!r} is not known; the nearest known one is {nearest[0]!r} (known: {', '.join(sorted(known))})"
    )
