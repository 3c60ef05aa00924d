from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from .. import ops


class RMSNorm(nn.Module):
    """x / rms(x) * weight. The weight is float32 and complete: 1 + w where a checkpoint stores w."""

    float32 = ("weight",)

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = mx.ones((size,))
        self.eps = eps

    def __call__(self, x, mean_square=None):
        return ops.rms_norm(x, self.weight, self.eps, mean_square)
