from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from .moe import Router
from .norm import RMSNorm


class ResidualMix(nn.Module):
    """Attention residuals (Kimi Team 2026): sum_s softmax_s(proj . norm(source_s)) source_s over the sums of blocks of layers."""

    def __init__(self, hidden_size: int, eps: float):
        super().__init__()
        self.norm = RMSNorm(hidden_size, eps)
        self.proj = Router(hidden_size, 1)

    def __call__(self, blocks: tuple, total):
        """blocks: earlier sums [B, T, H], oldest first; total: the current one. Returns [B, T, H] in its dtype."""
        if not blocks:
            return total
        sources = mx.stack([*blocks, total], axis=2).astype(mx.float32)  # [B, T, S, H]
        weights = mx.softmax(self.proj(self.norm(sources)), axis=2)  # [B, T, S, 1]
        return (weights * sources).sum(2).astype(total.dtype)
