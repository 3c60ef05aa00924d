from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class Columns:
    """Keys or values [B, Hkv, S, D] of which the first are held as they are and the others quantized; made float a tile at a time."""

    exact: mx.array | None  # [B, Hkv, S0, D]
    packed: tuple[mx.array, ...]  # integers, scales and biases of the other S - S0 columns, or ()
    group_size: int
    bits: int

    @property
    def split(self) -> int:
        return 0 if self.exact is None else self.exact.shape[2]

    @property
    def shape(self) -> tuple[int, ...]:
        if not self.packed:
            return self.exact.shape
        B, heads, count, groups = self.packed[1].shape
        return (B, heads, self.split + count, groups * self.group_size)

    @property
    def dtype(self) -> mx.Dtype:
        return self.packed[1].dtype if self.packed else self.exact.dtype

    def tile(self, begin: int, end: int) -> mx.array:
        """Columns begin to end as [B, Hkv, end - begin, D]."""
        parts = []
        if begin < self.split:
            parts.append(self.exact[:, :, begin : min(end, self.split)])
        if end > self.split:
            low, high = max(0, begin - self.split), end - self.split
            packed = (array[:, :, low:high] for array in self.packed)
            parts.append(mx.dequantize(*packed, group_size=self.group_size, bits=self.bits))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)
