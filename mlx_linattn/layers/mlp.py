from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from .. import ops
from ..spec import MlpSpec


def limited_swiglu(gate, up, limit: float | None):
    """silu(gate) * up, with silu(gate) cut above ``limit`` and up on both sides of it."""
    if limit is None:
        return ops.swiglu(gate, up)
    return mx.minimum(ops.silu(gate), limit) * mx.clip(up, -limit, limit)


class Mlp(nn.Module):
    def __init__(self, spec: MlpSpec, hidden_size: int):
        super().__init__()
        self.spec = spec
        self.gate_proj = nn.Linear(hidden_size, spec.size, bias=spec.bias)
        self.up_proj = nn.Linear(hidden_size, spec.size, bias=spec.bias)
        self.down_proj = nn.Linear(spec.size, hidden_size, bias=spec.bias)

    def __call__(self, x):
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.spec.activation == "gelu_tanh":
            return self.down_proj(nn.gelu_approx(gate) * up)
        return self.down_proj(limited_swiglu(gate, up, self.spec.limit))
