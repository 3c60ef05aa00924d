from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from .. import ops
from ..cuts import Block, columns, heads, rows
from ..spec import KdaSpec
from ..state import RecurrentState
from .part import Part


class LowRank(nn.Module):
    """up(down(x)): one projection through a narrow waist."""

    def __init__(self, inputs: int, rank: int, outputs: int, bias: bool = False):
        super().__init__()
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=bias)

    def __call__(self, x):
        return self.up(self.down(x))


class KimiDelta(Part):
    """Kimi Delta Attention (Kimi Team 2025). Its state is one convolution window and one matrix per value head."""

    float32 = ("A_log", "dt_bias", "norm_weight")

    def __init__(self, spec: KdaSpec, hidden_size: int):
        super().__init__()
        self.spec = spec
        keys, values = spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim
        decays = spec.value_heads * spec.key_dim
        self.q_proj = nn.Linear(hidden_size, keys, bias=False)
        self.k_proj = nn.Linear(hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(hidden_size, values, bias=False)
        self.f_proj = _projection(hidden_size, spec.decay_rank, decays, False)
        self.g_proj = _projection(hidden_size, spec.gate_rank, values, spec.gate_bias)
        self.b_proj = nn.Linear(hidden_size, spec.value_heads, bias=False)
        self.conv_weight = mx.zeros((spec.conv_channels, spec.conv_width))
        self.A_log = mx.zeros((spec.value_heads,))
        self.dt_bias = mx.zeros((decays,))
        self.norm_weight = mx.ones((spec.value_dim,))
        self.o_proj = nn.Linear(values, hidden_size, bias=False)

    @staticmethod
    def share(spec: KdaSpec, deal):
        value_heads, key_heads = deal.even(spec.value_heads, "value heads"), deal.spread(spec.key_heads, "key heads")
        return replace(spec, value_heads=value_heads, key_heads=key_heads)

    @staticmethod
    def cuts(spec: KdaSpec):
        k, v = Block(spec.key_heads, spec.key_dim), Block(spec.value_heads, spec.value_dim)
        each, decays = Block(spec.value_heads), Block(spec.value_heads, spec.key_dim)
        return {
            "q_proj": rows(k), "k_proj": rows(k), "v_proj": rows(v), "b_proj": rows(each), "conv_weight": rows(k, k, v),
            "f_proj" if spec.decay_rank is None else "f_proj.up": rows(decays),
            "g_proj" if spec.gate_rank is None else "g_proj.up": rows(v),
            "A_log": columns(each), "dt_bias": columns(decays), "o_proj": columns(v),
        }  # fmt: skip

    @staticmethod
    def state_cuts(spec: KdaSpec):
        k, v = Block(spec.key_heads, spec.key_dim), Block(spec.value_heads, spec.value_dim)
        return columns(k, k, v), heads(Block(spec.value_heads))  # window, matrix

    def make_state(self) -> RecurrentState:
        return RecurrentState(2)  # window, matrix

    def __call__(self, x, state: RecurrentState, span):
        spec = self.spec
        window, matrix = state.arrays
        qkv = mx.concatenate([self.q_proj(x), self.k_proj(x), self.v_proj(x)], axis=-1)
        y, *state.arrays = ops.delta_mixer(
            qkv, self.f_proj(x), self.b_proj(x), self.g_proj(x),
            conv_weight=self.conv_weight, A_log=self.A_log, dt_bias=self.dt_bias, norm_weight=self.norm_weight,
            window=window, state=matrix, key_heads=spec.key_heads, value_heads=spec.value_heads, key_dim=spec.key_dim,
            value_dim=spec.value_dim, lower_bound=spec.lower_bound, beta_scale=spec.beta_scale, output_gate="sigmoid",
            eps=spec.norm_eps, lengths=span.lengths,
        )  # fmt: skip
        return self.o_proj(y)


def _projection(inputs: int, rank: int | None, outputs: int, bias: bool) -> nn.Module:
    return nn.Linear(inputs, outputs, bias=bias) if rank is None else LowRank(inputs, rank, outputs, bias)
