"""Number formats of published quantised weights, recognised by the tensors beside them and decoded to float32.

    plain           X
    fp8 blocks      X (F8_E4M3), X_scale_inv [rows/128, columns/128]        value = code * scale_inv
    fp8 rows        X (F8_E4M3), X_scale [rows, 1] or [1]                   value = code * scale
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

from .errors import CheckpointError

BLOCK = 128
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
ACTIVATION_SCALE = re.compile(r".*\.(input_global_scale|input_scale|k_scale|v_scale)$")


@dataclass(frozen=True)
class Encoding:
    kind: str
    parts: tuple[str, ...]  # names of the tensors to read


def find(name: str, tensors: Mapping) -> Encoding | None:
    """How the tensor ``name`` is stored among ``tensors`` (name -> TensorInfo); None where it is not there."""
    companions = {
        "fp8 blocks": (name, f"{name}_scale_inv"),
        "nvfp4": (f"{name}_packed", f"{name}_scale", f"{name}_global_scale"),
        "nvfp4 modelopt": (name, f"{name}_scale", f"{name}_scale_2"),
        "mxfp4": (f"{name}_packed", f"{name}_scale"),
        "fp8 rows": (name, f"{name}_scale"),
    }
    for kind, parts in companions.items():
        if all(part in tensors for part in parts):
            return Encoding(kind, parts)
    if name not in tensors:
        return None
    if tensors[name].dtype.startswith("F8"):
        raise CheckpointError(
            f"tensor {name!r} is {tensors[name].dtype} but has no scale beside it ({name}_scale_inv or {name}_scale)"
        )
    return Encoding("plain", (name,))


def decode(encoding: Encoding, arrays: list[mx.array]) -> mx.array:
    """The numbers: as stored for plain tensors, float32 for all others."""
    return _DECODERS[encoding.kind](*arrays)


def _fp8_blocks(code, scale):
    rows, columns = code.shape[-2:]
    wide = mx.repeat(mx.repeat(scale.astype(mx.float32), BLOCK, axis=-2), BLOCK, axis=-1)
    return mx.from_fp8(code, dtype=mx.float32) * wide[..., :rows, :columns]


def _fp8_rows(code, scale):
    return mx.from_fp8(code, dtype=mx.float32) * scale.astype(mx.float32)


def _nvfp4(packed, scale, global_scale):
    return _grouped(packed, mx.from_fp8(scale, dtype=mx.float32) / global_scale.reshape(-1, 1))


def _nvfp4_modelopt(packed, scale, scale_2):
    return _grouped(packed, mx.from_fp8(scale, dtype=mx.float32) * scale_2.reshape(-1, 1))


def _mxfp4(packed, scale):
    return _grouped(packed, mx.power(2.0, scale.astype(mx.float32) - 127.0))


def _grouped(packed, scale):
    nibbles = mx.stack([packed & 0xF, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    values = mx.array(E2M1)[nibbles & 7]
    values = mx.where(nibbles & 8, -values, values)
    return values * mx.repeat(scale, values.shape[-1] // scale.shape[-1], axis=-1)


_DECODERS = {
    "plain": lambda array: array,
    "fp8 blocks": _fp8_blocks,
    "fp8 rows": _fp8_rows,
    "nvfp4": _nvfp4,
    "nvfp4 modelopt": _nvfp4_modelopt,
    "mxfp4": _mxfp4,
}
