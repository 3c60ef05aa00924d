"""The numbers of one entry of a plan: read, transformed, rounded, quantized."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx

from mlx_linattn.errors import ConvertError
from mlx_linattn.layout import Take
from mlx_linattn.weights import Tensors

from .bits import Quantization
from .plan import DTYPES, Entry

NEGLIGIBLE = 1e-6  # of a tensor's largest number


PIECE = 256 << 20  # bytes of float32 numbers that are worked on at a time, where a tensor can be cut


def pieces(entry: Entry) -> Iterator[tuple[slice, Entry]]:
    """The entry cut along its first axis where that is a stack of many sources, such as a layer's experts."""
    count = len(entry.take.sources)
    if entry.take.steps != (("stack",),) or entry.shape[0] != count:
        yield slice(None), entry
        return
    step = max(1, PIECE * count // (4 * entry.parameters))
    for i in range(0, count, step):
        sources = entry.take.sources[i : i + step]
        part = replace(entry, take=Take(sources, ("stack",)), shape=(len(sources), *entry.shape[1:]))
        yield slice(i, i + len(sources)), part


def arrays(entry: Entry, source: Tensors) -> dict[str, mx.array]:
    """The outputs of one entry. Raises ConvertError for numbers that cannot be right."""
    q = entry.quantization
    if entry.copied:
        parts = packed_parts(entry, source)
        # An asked dtype holds for scales as well.
        return {output.name: part.astype(DTYPES[output.dtype]) for output, part in zip(entry.outputs, parts)}
    plain = numbers(entry, source)
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


def numbers(entry: Entry, source: Tensors) -> mx.array:
    """What is to be quantized or written, in its dtype."""
    dtype = DTYPES.get(entry.dtype)
    if entry.was is not None:
        plain = dequantize(packed_parts(entry, source), entry.was)
    else:
        plain = source.make(entry.take, dtype or mx.float32)
    return plain if dtype is None else plain.astype(dtype)


def packed_parts(entry: Entry, source: Tensors) -> list[mx.array]:
    """[weight, scales, biases] of a source that is quantized as MLX does it."""
    packed = source.make_packed(entry.take)
    if packed is not None:
        return packed
    base = entry.name.removesuffix(".weight")
    names = [f"{base}.{part}" for part in ("scales", "biases")]
    return [source.read(entry.name), *(source.read(name) for name in names if name in source)]


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
