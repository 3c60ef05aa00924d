from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from ..spec import MlpSpec


def swiglu(gate, up, limit: float | None = None):
    opened = gate * mx.sigmoid(gate)
    if limit is not None:
        opened, up = mx.minimum(opened, limit), mx.clip(up, -limit, limit)
    return opened * up


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
        return self.down_proj(swiglu(gate, up, self.spec.limit))
