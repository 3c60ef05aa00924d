from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from .. import ops
from ..cuts import Block, columns, rows
from ..spec import MambaSpec
from ..state import RecurrentState
from .part import Part


class Mamba(Part):
    """Mamba-1 (Gu and Dao 2023). Its state is one convolution window and ``state_size`` float32 numbers per inner channel.

    [x | z] = in_proj u;  x = silu(conv(x));  [dt | B | C] = x_proj x, each normed where the spec says so
    delta = softplus(dt_proj dt + dt_bias);  h_t = exp(delta A) h_{t-1} + delta x B;  y = out_proj((C . h + D x) silu(z))
    """

    float32 = ("conv_weight", "conv_bias", "dt_bias", "A_log", "D", "dt_norm", "B_norm", "C_norm")

    def __init__(self, spec: MambaSpec, hidden_size: int):
        super().__init__()
        self.spec = spec
        self.in_proj = nn.Linear(hidden_size, 2 * spec.inner, bias=spec.bias)
        self.conv_weight = mx.zeros((spec.inner, spec.conv_width))
        if spec.conv_bias:
            self.conv_bias = mx.zeros((spec.inner,))
        self.x_proj = nn.Linear(spec.inner, sum(self._sizes), bias=False)
        self.dt_proj = nn.Linear(spec.step_rank, spec.inner, bias=False)
        self.dt_bias = mx.zeros((spec.inner,))  # apart from dt_proj, because it is added in float32
        self.A_log = mx.zeros((spec.inner, spec.state_size))
        self.D = mx.zeros((spec.inner,))
        if spec.step_norm == "weighted":
            self.dt_norm, self.B_norm, self.C_norm = (mx.ones((size,)) for size in self._sizes)
        self.out_proj = nn.Linear(spec.inner, hidden_size, bias=spec.bias)

    @staticmethod
    def share(spec: MambaSpec, deal):
        return replace(spec, inner=deal.even(spec.inner, "inner channels"))

    @staticmethod
    def cuts(spec: MambaSpec):
        each = Block(spec.inner)
        return {
            "in_proj": rows(each, each), "conv_weight": rows(each), "conv_bias": columns(each), "x_proj": columns(each),
            "dt_proj": rows(each), "dt_bias": columns(each), "A_log": rows(each), "D": columns(each),
            "out_proj": columns(each),
        }  # fmt: skip

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return self.spec.step_rank, self.spec.state_size, self.spec.state_size

    @staticmethod
    def state_cuts(spec: MambaSpec):
        return columns(Block(spec.inner)), rows(Block(spec.inner))  # window, h [B, inner, N]

    def make_state(self) -> RecurrentState:
        return RecurrentState(2)  # window, h

    def __call__(self, u, state: RecurrentState, span):
        spec = self.spec
        window, h = state.arrays
        x, z = mx.split(self.in_proj(u), 2, axis=-1)
        x, window = ops.short_conv(
            x, self.conv_weight, self.conv_bias if spec.conv_bias else None, window, lengths=span.lengths
        )
        steps = self.ranks.sum(self.x_proj(x))  # every channel takes part in everyone's dt, B and C
        dt, B, C = self._normed(mx.split(steps, [spec.step_rank, spec.step_rank + spec.state_size], axis=-1))
        delta = mx.logaddexp(self.dt_proj(dt).astype(mx.float32) + self.dt_bias, 0.0)
        y, h = ops.selective_scan(x, delta, -mx.exp(self.A_log), B, C, self.D, h, span.lengths)
        state.arrays = [window, h]
        return self.out_proj(ops.swiglu(z, y))

    def _normed(self, steps):
        if self.spec.step_norm is None:
            return steps
        weights = (self.dt_norm, self.B_norm, self.C_norm) if self.spec.step_norm == "weighted" else (None,) * 3
        return [ops.rms_norm(y, weight, self.spec.norm_eps) for y, weight in zip(steps, weights)]
