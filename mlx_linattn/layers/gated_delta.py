from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from .. import ops
from ..cuts import Block, columns, heads, rows
from ..spec import GatedDeltaSpec
from ..state import RecurrentState
from .part import Part


class GatedDelta(Part):
    """Gated DeltaNet (Yang et al. 2024); without decay, DeltaNet. Its state is one convolution window and one matrix per value head."""

    float32 = ("A_log", "dt_bias", "norm_weight")

    def __init__(self, spec: GatedDeltaSpec, hidden_size: int):
        super().__init__()
        self.spec = spec
        values = spec.value_heads * spec.value_dim
        if spec.separate_qkv:
            self.q_proj = nn.Linear(hidden_size, spec.key_heads * spec.key_dim, bias=False)
            self.k_proj = nn.Linear(hidden_size, spec.key_heads * spec.key_dim, bias=False)
            self.v_proj = nn.Linear(hidden_size, values, bias=False)
        else:
            self.in_proj_qkv = nn.Linear(hidden_size, spec.conv_channels, bias=False)
        if spec.output_gate is not None:
            self.in_proj_z = nn.Linear(hidden_size, values, bias=False)
        self.in_proj_b = nn.Linear(hidden_size, spec.value_heads, bias=False)
        if spec.decay:
            self.in_proj_a = nn.Linear(hidden_size, spec.value_heads, bias=False)
            self.A_log = mx.zeros((spec.value_heads,))
            self.dt_bias = mx.zeros((spec.value_heads,))
        self.conv_weight = mx.zeros((spec.conv_channels, spec.conv_width))
        self.norm_weight = mx.ones((spec.value_dim,))
        self.out_proj = nn.Linear(values, hidden_size, bias=False)

    @staticmethod
    def share(spec: GatedDeltaSpec, deal):
        value_heads, key_heads = deal.even(spec.value_heads, "value heads"), deal.spread(spec.key_heads, "key heads")
        return replace(spec, value_heads=value_heads, key_heads=key_heads)

    @staticmethod
    def cuts(spec: GatedDeltaSpec):
        k, v = Block(spec.key_heads, spec.key_dim), Block(spec.value_heads, spec.value_dim)
        each = Block(spec.value_heads)
        return {
            "in_proj_qkv": rows(k, k, v), "q_proj": rows(k), "k_proj": rows(k), "v_proj": rows(v), "in_proj_z": rows(v),
            "in_proj_b": rows(each), "in_proj_a": rows(each), "A_log": columns(each), "dt_bias": columns(each),
            "conv_weight": rows(k, k, v), "out_proj": columns(v),
        }  # fmt: skip

    @staticmethod
    def state_cuts(spec: GatedDeltaSpec):
        k, v = Block(spec.key_heads, spec.key_dim), Block(spec.value_heads, spec.value_dim)
        return columns(k, k, v), heads(Block(spec.value_heads))  # window, matrix

    def make_state(self) -> RecurrentState:
        return RecurrentState(2)  # window, matrix

    def __call__(self, x, state: RecurrentState, span):
        spec = self.spec
        window, matrix = state.arrays
        if spec.separate_qkv:
            qkv = mx.concatenate([self.q_proj(x), self.k_proj(x), self.v_proj(x)], axis=-1)
        else:
            qkv = self.in_proj_qkv(x)
        y, *state.arrays = ops.delta_mixer(
            qkv,
            self.in_proj_a(x) if spec.decay else None,
            self.in_proj_b(x),
            self.in_proj_z(x) if spec.output_gate else None,
            conv_weight=self.conv_weight, A_log=self.get("A_log"), dt_bias=self.get("dt_bias"), norm_weight=self.norm_weight,
            window=window, state=matrix, key_heads=spec.key_heads, value_heads=spec.value_heads, key_dim=spec.key_dim,
            value_dim=spec.value_dim, beta_scale=spec.beta_scale, output_gate=spec.output_gate,
            eps=spec.norm_eps, lengths=span.lengths,
        )  # fmt: skip
        return self.out_proj(y)
