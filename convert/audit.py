"""Every tensor of a result, read back from disk, against the source it was made from."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_linattn.errors import ConvertError
from mlx_linattn.weights import Tensors

from .bits import Quantization
from .plan import DTYPES, Entry, Plan
from .tensors import Rows, dequantize, numbers, packed_parts, pieces


@dataclass(frozen=True)
class Loss:
    """What quantization cost one weight."""

    name: str
    quantization: str
    relative_error: float  # root mean square of the difference over that of the weight


def audit(plan: Plan, source: Tensors, result: Tensors) -> list[Loss]:
    """Raises ConvertError where a tensor is not what it was made from, within its quantization's step."""
    losses = []
    for entry in plan.entries:
        error = weight = 0.0
        for rows in pieces(entry, source):
            stored = [result.checkpoint.read(output.name, rows) for output in entry.outputs]
            squares = _check(entry, stored, source, rows)
            error, weight = error + squares[0], weight + squares[1]
            source.checkpoint.release()
            result.checkpoint.release()
            mx.clear_cache()
        if entry.quantization is not None and not entry.copied:
            losses.append(Loss(entry.module, str(entry.quantization), (error / max(weight, 1e-30)) ** 0.5))
    return sorted(losses, key=lambda loss: -loss.relative_error)


def _check(entry: Entry, stored: list[mx.array], source: Tensors, rows: Rows) -> tuple[float, float]:
    """Sums of squares of the errors and of the weights."""
    q = entry.quantization
    if entry.copied:
        for output, got, part in zip(entry.outputs, stored, packed_parts(entry, source, rows)):
            _require(mx.array_equal(got, part.astype(DTYPES[output.dtype])), entry)
        return 0.0, 0.0
    want = numbers(entry, source, rows)
    if q is None:
        _require(mx.array_equal(stored[0], want), entry)
        return 0.0, 0.0
    want = want.astype(mx.float32)
    got = dequantize(stored, q).astype(mx.float32)
    error = mx.abs(got - want).reshape(*want.shape[:-1], -1, q.group_size).max(-1)
    _require((error <= largest_error(q, want)).all(), entry)
    return mx.square(got - want).sum().item(), mx.square(want).sum().item()


def _require(holds: mx.array, entry: Entry) -> None:
    if not holds.item():
        raise ConvertError(
            f"tensor {entry.target!r} of the result does not hold what was read from the source; "
            "memory, disk or source changed meanwhile: convert again"
        )


def largest_error(q: Quantization, weight: mx.array) -> mx.array:
    """How far a group's numbers may lie from ``weight`` [..., n]: [..., n / group].

    affine        two steps (the grid is shifted so that it holds zero), and what bfloat16 scales and offsets round
    nvfp4, mxfp4  a third of the group's largest (2 of 6 between its two largest codes, and a rounded scale);
                  nvfp4's scales have a smallest step of 2^-9
    mxfp8         a seventh (a power of two as scale cuts up to 64 off 512)
    """
    groups = weight.reshape(*weight.shape[:-1], -1, q.group_size)
    largest = mx.abs(groups).max(-1)
    if q.mode == "affine":
        span = mx.maximum(groups.max(-1), 0) - mx.minimum(groups.min(-1), 0)
        return 2 * span / (2**q.bits - 1) + largest / 128 + 1e-6
    return largest * (0.34 if q.bits == 4 else 0.15) + (6 * 2**-10 if q.mode == "nvfp4" else 1e-6)
