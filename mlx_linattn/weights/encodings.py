"""Number formats of published quantised weights, recognised by the tensors beside them and decoded to float32.

    plain           X
    fp8 blocks      X (F8_E4M3), X_scale_inv [rows/128, columns/128]        value = code * scale_inv
    fp8 rows        X (F8_E4M3), X_scale [rows, 1], [rows] or [1]           value = code * scale
    nvfp4           X_packed, X_scale (F8_E4M3, groups of 16), X_global_scale     value = code * scale / global_scale
    nvfp4 modelopt  X (U8), X_scale (F8_E4M3, groups of 16), X_scale_2            value = code * scale * scale_2
    mxfp4           X_packed, X_scale (U8, groups of 32)                          value = code * 2^(scale - 127)

4-bit codes are E2M1, two in a byte, the low half first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx

from ..errors import CheckpointError

BLOCK = 128
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
ACTIVATION_SCALE = re.compile(r".*\.(input_global_scale|input_scale|k_scale|v_scale)$")


@dataclass(frozen=True)
class Encoding:
    kind: str
    parts: tuple[str, ...]  # names of the tensors to read


FORMATS = {  # kind -> (suffix, dtypes) of its parts
    "fp8 blocks": (("", "F8_E4M3"), ("_scale_inv", "BF16 F16 F32")),
    "nvfp4": (("_packed", "U8"), ("_scale", "F8_E4M3"), ("_global_scale", "F32")),
    "nvfp4 modelopt": (("", "U8"), ("_scale", "F8_E4M3"), ("_scale_2", "F32")),
    "mxfp4": (("_packed", "U8"), ("_scale", "U8")),
    "fp8 rows": (("", "F8_E4M3"), ("_scale", "BF16 F16 F32")),
}
COMPANION = re.compile(r".*_(scale_inv|scale|scale_2|global_scale|packed)$")


def find(name: str, tensors: Mapping) -> Encoding | None:
    """How the tensor ``name`` is stored among ``tensors`` (name -> TensorInfo); None where it is not there."""
    for kind, parts in FORMATS.items():
        stored = [(name + suffix, dtypes) for suffix, dtypes in parts]
        if all(part in tensors and tensors[part].dtype in dtypes.split() for part, dtypes in stored):
            return Encoding(kind, tuple(part for part, _ in stored))
    if name not in tensors:
        return None
    if tensors[name].dtype.startswith("F8"):
        raise CheckpointError(
            f"tensor {name!r} is {tensors[name].dtype}, but no scale of a known format lies beside it "
            f"(such as {name}_scale_inv)"
        )
    return Encoding("plain", (name,))


def decode(encoding: Encoding, arrays: list[mx.array]) -> mx.array:
    """The numbers: as stored for plain tensors, float32 for all others."""
    if encoding.kind == "plain":
        return arrays[0]
    try:
        return _DECODERS[encoding.kind](*arrays)
    except _ShapesDiffer as error:
        shapes = ", ".join(f"{part} {list(array.shape)}" for part, array in zip(encoding.parts, arrays))
        raise CheckpointError(f"scales do not fit their weight: {shapes} ({encoding.kind})") from error


def blocks(encoding: Encoding, shapes: list[tuple[int, ...]], axis: int, length: int) -> list[int]:
    """How many of the ``length`` numbers along ``axis`` share one entry of each part; 0 where all of them do.

    ``shapes``: of the parts as they are stored.
    """
    code, *scales = shapes
    found = [length // code[axis]]
    for shape in scales:
        if len(shape) != len(code):  # one scale for each matrix or row
            found.append(length // shape[axis] if axis < len(shape) and shape[axis] > 1 else 0)
        elif encoding.kind == "fp8 blocks":
            found.append(BLOCK if axis >= len(shape) - 2 else 1)
        elif encoding.kind == "fp8 rows" and shape[axis] == 1:
            found.append(0)
        else:
            found.append(length // shape[axis])
    return found


class _ShapesDiffer(Exception):
    pass


def _fp8_blocks(code, scale):
    *outer, rows, columns = code.shape
    if scale.shape != (*outer, -(-rows // BLOCK), -(-columns // BLOCK)):
        raise _ShapesDiffer
    wide = mx.repeat(mx.repeat(scale.astype(mx.float32), BLOCK, axis=-2), BLOCK, axis=-1)
    return mx.from_fp8(code, dtype=mx.float32) * wide[..., :rows, :columns]


def _fp8_rows(code, scale):
    return mx.from_fp8(code, dtype=mx.float32) * _per_row(scale, code).astype(mx.float32)


def _nvfp4(packed, scale, global_scale):
    return _grouped(packed, mx.from_fp8(scale, dtype=mx.float32) / _per_row(global_scale, packed), 16)


def _nvfp4_modelopt(packed, scale, scale_2):
    return _grouped(packed, mx.from_fp8(scale, dtype=mx.float32) * _per_row(scale_2, packed), 16)


def _mxfp4(packed, scale):
    return _grouped(packed, mx.power(2.0, scale.astype(mx.float32) - 127.0), 32)


def _per_row(scale, code):
    """One scale for all, or one for each matrix or row, so shaped that it multiplies ``code``."""
    if scale.size == 1:
        return scale.reshape([1] * code.ndim)
    scale = scale.reshape(*scale.shape, *[1] * (code.ndim - scale.ndim))
    if any(n not in (1, m) for n, m in zip(scale.shape, (*code.shape[:-1], 1))) or scale.ndim != code.ndim:
        raise _ShapesDiffer
    return scale


def _grouped(packed, scale, group):
    if scale.shape != (*packed.shape[:-1], 2 * packed.shape[-1] // group):
        raise _ShapesDiffer
    nibbles = mx.stack([packed & 0xF, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    values = mx.array(E2M1)[nibbles & 7]
    values = mx.where(nibbles & 8, -values, values)
    return values * mx.repeat(scale, group, axis=-1)


_DECODERS = {
    "fp8 blocks": _fp8_blocks,
    "fp8 rows": _fp8_rows,
    "nvfp4": _nvfp4,
    "nvfp4 modelopt": _nvfp4_modelopt,
    "mxfp4": _mxfp4,
}
