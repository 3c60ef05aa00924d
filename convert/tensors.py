"""The numbers of one entry of a plan: read, transformed, rounded, quantized."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx

from mlx_linattn.errors import ConvertError
from mlx_linattn.weights import Tensors

from .bits import Quantization
from .plan import DTYPES, Entry

NEGLIGIBLE = 1e-6  # of a tensor's largest number
PIECE = 64 << 20  # bytes of float32 numbers that are worked on at a time, where a tensor can be cut

Rows = slice | None  # of a tensor's first axis; None: all


def pieces(entry: Entry, source: Tensors) -> Iterator[Rows]:
    """The rows of an entry that are worked on at a time: those of a large one, such as a stack of experts, bit by bit."""
    rows = entry.shape[0] if entry.shape else 1
    step = max(1, PIECE * rows // max(1, 4 * entry.parameters))
    if step >= rows or not source.can_cut(entry.take):
        yield None
        return
    for i in range(0, rows, step):
        yield slice(i, min(i + step, rows))


def arrays(entry: Entry, source: Tensors, rows: Rows = None) -> dict[str, mx.array]:
    """The outputs of one entry, or of some rows of it. Raises ConvertError for numbers that cannot be right."""
    q = entry.quantization
    if entry.copied:
        parts = packed_parts(entry, source, rows)
        # An asked dtype holds for scales as well.
        return {output.name: part.astype(DTYPES[output.dtype]) for output, part in zip(entry.outputs, parts)}
    plain = numbers(entry, source, rows)
    if mx.issubdtype(plain.dtype, mx.floating) and not mx.isfinite(plain).all().item():
        raise ConvertError(
            f"{source.checkpoint.folder}: tensor {entry.name!r} holds NaN or infinite numbers"
            + (", or numbers too large for float16" if entry.dtype == "F16" else "")
        )
    if q is None:
        return {entry.target: plain}
    packed = mx.quantize(plain, q.group_size, q.bits, mode=q.mode)
    _check_no_group_lost(entry, plain, packed)
    return {output.name: part for output, part in zip(entry.outputs, packed)}


def numbers(entry: Entry, source: Tensors, rows: Rows = None) -> mx.array:
    """What is to be quantized or written, in its dtype."""
    dtype = DTYPES.get(entry.dtype)
    if entry.was is not None:
        plain = dequantize(packed_parts(entry, source, rows), entry.was)
    else:
        plain = source.make(entry.take, dtype or mx.float32, rows)
    return plain if dtype is None else plain.astype(dtype)


def packed_parts(entry: Entry, source: Tensors, rows: Rows = None) -> list[mx.array]:
    """[weight, scales, biases] of a source that is quantized as MLX does it."""
    packed = source.make_packed(entry.take, rows)
    if packed is not None:
        return packed
    base = entry.name.removesuffix(".weight")
    names = [entry.name, *(f"{base}.{part}" for part in ("scales", "biases"))]
    return [source.read(name, rows=rows) for name in names if name in source]


def dequantize(parts: list[mx.array], q: Quantization) -> mx.array:
    """The numbers behind [weight, scales, biases]."""
    weight, scales, *biases = parts
    return mx.dequantize(weight, scales, *biases, group_size=q.group_size, bits=q.bits, mode=q.mode)


def _check_no_group_lost(entry: Entry, numbers: mx.array, packed) -> None:
    """A group that had numbers must not have become all zero: a mode's scales can be too coarse for small weights."""
    q = entry.quantization
    before = mx.abs(numbers).reshape(*numbers.shape[:-1], -1, q.group_size).max(-1)
    after = mx.abs(dequantize(packed, q)).reshape(*numbers.shape[:-1], -1, q.group_size).max(-1)
    lost = (after == 0) & (before > NEGLIGIBLE * before.max())
    count = lost.sum().item()
    if count:
        raise ConvertError(
            f"{q} quantization turns {count} of {lost.size} groups of {entry.name!r} into zeros, which they are not; "
            "give this weight another mode or more bits"
        )
