from __future__ import annotations

import mlx.nn as nn

from .. import ops
from ..spec import MlpSpec


class Mlp(nn.Module):
    def __init__(self, spec: MlpSpec, hidden_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, spec.size, bias=False)
        self.up_proj = nn.Linear(hidden_size, spec.size, bias=False)
        self.down_proj = nn.Linear(spec.size, hidden_size, bias=False)

    def __call__(self, x):
        return self.down_proj(ops.swiglu(self.gate_proj(x), self.up_proj(x)))
