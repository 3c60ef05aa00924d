from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from .. import ops
from ..cuts import Block, columns, rows
from ..spec import MlpSpec
from .part import Part


def limited_swiglu(gate, up, limit: float | None, soft_limits: tuple[float, float] | None = None):
    """silu(gate) * up within the limits that MlpSpec describes."""
    if soft_limits is not None:
        a, b = soft_limits
        gate32, up32 = gate.astype(mx.float32), up.astype(mx.float32)
        return (a * mx.tanh(gate32 / a) * mx.sigmoid(gate32) * (b * mx.tanh(up32 / b))).astype(up.dtype)
    if limit is None:
        return ops.swiglu(gate, up)
    return mx.minimum(ops.silu(gate), limit) * mx.clip(up, -limit, limit)


class Mlp(Part):
    def __init__(self, spec: MlpSpec, hidden_size: int):
        super().__init__()
        self.spec = spec
        self.gate_proj = nn.Linear(hidden_size, spec.size, bias=spec.bias)
        self.up_proj = nn.Linear(hidden_size, spec.size, bias=spec.bias)
        self.down_proj = nn.Linear(spec.size, hidden_size, bias=spec.bias)

    @staticmethod
    def share(spec: MlpSpec, deal):
        return replace(spec, size=deal.even(spec.size, "features"))

    @staticmethod
    def cuts(spec: MlpSpec):
        each = Block(spec.size)
        return {"gate_proj": rows(each), "up_proj": rows(each), "down_proj": columns(each)}

    def __call__(self, x):
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.spec.activation == "gelu_tanh":
            return self.down_proj(nn.gelu_approx(gate) * up)
        return self.down_proj(limited_swiglu(gate, up, self.spec.limit, self.spec.soft_limits))
