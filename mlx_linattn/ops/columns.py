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

    def part(self, begin: int, end: int) -> Columns:
        """Columns begin to end, still as they are held."""
        exact = self.exact[:, :, begin : min(end, self.split)] if begin < self.split else None
        low, high = max(0, begin - self.split), end - self.split
        packed = tuple(array[:, :, low:high] for array in self.packed) if high > 0 else ()
        return Columns(exact, packed, self.group_size, self.bits)

    def floats(self) -> mx.array:
        """All of them as one array [B, Hkv, S, D]."""
        parts = [] if self.exact is None else [self.exact]
        if self.packed:
            parts.append(mx.dequantize(*self.packed, group_size=self.group_size, bits=self.bits))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)

    def dot(self, q: mx.array) -> mx.array:
        """Products of q [B, Hkv, R, D] with all of them, [B, Hkv, R, S] in q's dtype; nothing is made float beforehand."""
        parts = [] if self.exact is None else [q @ self.exact.astype(q.dtype).swapaxes(-1, -2)]
        if self.packed:
            parts.append(mx.quantized_matmul(q, *self.packed, True, self.group_size, self.bits))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)

    def weigh(self, weights: mx.array) -> mx.array:
        """Their sum with weights [B, Hkv, R, S], [B, Hkv, R, D]."""
        split, total = self.split, 0.0
        if self.exact is not None:
            total = weights[..., :split] @ self.exact.astype(weights.dtype)
        if self.packed:
            total = total + mx.quantized_matmul(weights[..., split:], *self.packed, False, self.group_size, self.bits)
        return total
