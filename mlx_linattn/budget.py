"""How much memory something will take, before any of it is taken.

    held       what MLX holds now: weights, states, checkpoints, whatever else the process keeps
    state      what the state will grow by: recurrent arrays once, keys and values with every token
    temporary  what reading one piece of a prompt needs besides; it depends on the piece, not on the context

Sizes of states are not computed from formulas but read off the arrays of a forward pass of one token that is never evaluated.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from .errors import MemoryLimitError
from .model import Model
from .ops.attention import block_sizes
from .spec import MoeSpec
from .state import KVState, ModelState

PREFILL_STEPS = (2048, 1024, 512, 256, 128, 64)
CHECKPOINT_SHARE = 16  # checkpoints get this part of the working set
IN_FLIGHT = 12  # temporary arrays of one operation that MLX may hold at a time, as it runs ahead


@dataclass(frozen=True)
class Estimate:
    """Bytes, as the module says."""

    held: int
    state: int
    temporary: int

    @property
    def total(self) -> int:
        return self.held + self.state + self.temporary


def working_set() -> int:
    """Bytes that the default device can hold at a time: Metal's recommendation, a GPU's memory, or the machine's."""
    if mx.default_device().type == mx.DeviceType.gpu:
        info = mx.device_info()
        for key in ("max_recommended_working_set_size", "total_memory", "memory_size"):
            if info.get(key):
                return int(info[key])
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")] if hasattr(os, "sysconf") else [1 << 62]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):  # a container's limit
        try:
            sizes.append(int(Path(file).read_text()))
        except (OSError, ValueError):
            continue
    return min(sizes)


def checkpoint_bytes() -> int:
    """How much a session's checkpoints may take by default."""
    return working_set() // CHECKPOINT_SHARE


def require(need: Estimate, limit: float | None, what: str, advice: str) -> None:
    """Raise MemoryLimitError where ``need`` exceeds ``limit`` bytes (None: the device's working set)."""
    most = working_set() if limit is None else limit
    if need.total > most:
        whose = "this device's working set" if limit is None else "memory_limit"
        raise MemoryLimitError(
            f"{what} needs {_size(need.total)}: {_size(need.held)} held already, {_size(need.state)} for state and cache, "
            f"{_size(need.temporary)} temporary; {whose} is {_size(most)}. {advice}, or override with memory_limit= (--force)"
        )


def require_weights(nbytes: int, limit: float | None, where: str) -> None:
    """Before weights are read: do they fit?"""
    most = working_set() if limit is None else limit
    held = mx.get_active_memory()
    if held + nbytes > most:
        whose = "this device's working set" if limit is None else "memory_limit"
        raise MemoryLimitError(
            f"{where}: its weights take {_size(nbytes)}, beside {_size(held)} held already; {whose} is {_size(most)}. "
            "Use a smaller or more strongly quantized model, or override with memory_limit= (--force)"
        )


def estimate(model: Model, state: ModelState, tokens: int, step: int) -> Estimate:
    """What reading ``tokens`` more tokens into ``state``, ``step`` at a time, will take."""
    probe = _probe(model, state)
    end = state.offset + tokens
    grown = probe.nbytes_with(end)
    # While a buffer grows, the old one is there as well.
    moving = (
        max((layer.nbytes for layer in state if getattr(layer, "length", 0)), default=0) if grown > state.nbytes else 0
    )
    return Estimate(mx.get_active_memory(), grown - state.nbytes, moving + temporary(model, min(step, tokens)))


def estimate_rows(model: Model, state: ModelState, rows: int, tokens: int, held: int, step: int) -> Estimate:
    """What ``rows`` sequences of up to ``tokens`` tokens take in one state, if states hold ``held`` bytes of it already.

    state: one of no tokens, for its options.  step: tokens of a prompt that are read at a time.
    """
    one = _probe(model, state)
    # The rows' buffers are all as long as the longest. Where a row joins or leaves, a layer's are copied, one layer after the other.
    grown = rows * one.nbytes_with(tokens)
    moving = rows * max(layer.nbytes_with(tokens) if isinstance(layer, KVState) else layer.nbytes for layer in one)
    return Estimate(mx.get_active_memory(), max(0, grown - held), moving + temporary(model, max(rows, step)))


def fixed_nbytes(model: Model, state: ModelState) -> int:
    """Bytes of a state that do not grow with its tokens: what a checkpoint holds."""
    return _probe(model, state).recurrent_nbytes


def _probe(model: Model, state: ModelState) -> ModelState:
    """A state of one token at least, for its shapes; nothing is evaluated."""
    if state.counts:
        return state
    return model.rehearse(state)


def temporary(model: Model, tokens: int) -> int:
    """Bytes that reading ``tokens`` tokens at a time needs besides the state: an upper bound, near the truth."""
    layers = max(_layer_width(layer) for layer in model.layers) * tokens * 4
    heads = max((getattr(layer.spec.mixer, "heads", 0) for layer in model.layers), default=0)
    block, tile = block_sizes()
    scores = heads * min(tokens, block) * tile * 4 * IN_FLIGHT if tokens > 1 else 0
    logits = 3 * 4 * model.spec.vocab_size
    return layers + scores + logits


def _layer_width(layer: nn.Module) -> int:
    """Features that a token has inside a layer, all projections together."""
    mlp = layer.spec.mlp
    width = 0
    for _, module in layer.named_modules():
        weight = module.get("weight")
        if weight is not None and weight.ndim >= 2:
            copies = mlp.top_k if isinstance(mlp, MoeSpec) and weight.ndim == 3 else 1
            width += copies * weight.shape[-2]
    return 3 * width


def prefill_step(
    model: Model, state: ModelState, tokens: int, limit: float | None = None, step: int | None = None, later: int = 0
) -> int:
    """How many tokens of a prompt of ``tokens`` to read at a time, so that all fits; ``step`` where the caller chose.

    ``later``: tokens that will be generated. Raises MemoryLimitError, before anything is allocated, where no step fits.
    """
    most = working_set() if limit is None else limit
    steps = PREFILL_STEPS if step is None else (step,)
    for size in steps:
        need = estimate(model, state, tokens + later, min(size, tokens))
        if need.total <= most:
            return size
    require(
        need, limit, f"reading {tokens:,} tokens", "Shorten the prompt, or bound the cache with max_kv_size or kv_bits"
    )
    return steps[-1]


def _size(nbytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if nbytes >= size:
            return f"{nbytes / size:,.2f} {unit}"
    return f"{nbytes / 1e3:,.1f} kB"
