from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from .. import ops
from ..cuts import Block, columns, heads, rows
from ..spec import RgLruSpec
from ..state import RecurrentState
from .part import Part


class RgLru(Part):
    """Griffin's recurrent block (De et al. 2024). Its state is one convolution window and one float32 number per channel.

    x = conv(linear_x u);  i = sigmoid(x W_i + b_i);  r = sigmoid(x W_r + b_r), block-diagonal
    log a = -8 r softplus(Lambda);  h_t = a h_{t-1} + sqrt(1 - a^2) i x, the first token of a sequence without the root
    y = linear_out(h * gelu(linear_y u))
    """

    float32 = (
        "conv_weight",
        "conv_bias",
        "input_gate_bias",
        "recurrent_gate_bias",
        "recurrent_param",
    )

    def __init__(self, spec: RgLruSpec, hidden_size: int):
        super().__init__()
        self.spec = spec
        block = spec.width // spec.heads
        self.linear_x = nn.Linear(hidden_size, spec.width)
        self.linear_y = nn.Linear(hidden_size, spec.width)
        self.linear_out = nn.Linear(spec.width, hidden_size)
        self.conv_weight = mx.zeros((spec.width, spec.conv_width))
        self.conv_bias = mx.zeros((spec.width,))
        self.input_gate_weight = mx.zeros((spec.heads, block, block))
        self.input_gate_bias = mx.zeros((spec.heads, block))
        self.recurrent_gate_weight = mx.zeros((spec.heads, block, block))
        self.recurrent_gate_bias = mx.zeros((spec.heads, block))
        self.recurrent_param = mx.zeros((spec.width,))  # Lambda

    @staticmethod
    def share(spec: RgLruSpec, deal):
        count = deal.even(spec.heads, "heads")
        return replace(spec, heads=count, width=spec.width // spec.heads * count)

    @staticmethod
    def cuts(spec: RgLruSpec):
        each, blocks = Block(spec.heads, spec.width // spec.heads), Block(spec.heads)
        return {
            "linear_x": rows(each), "linear_y": rows(each), "linear_out": columns(each),
            "conv_weight": rows(each), "conv_bias": columns(each), "recurrent_param": columns(each),
            "input_gate_weight": heads(blocks), "recurrent_gate_weight": heads(blocks),
            "input_gate_bias": rows(blocks), "recurrent_gate_bias": rows(blocks),
        }  # fmt: skip

    @staticmethod
    def state_cuts(spec: RgLruSpec):
        return (columns(Block(spec.heads, spec.width // spec.heads)),)  # window, h

    def make_state(self) -> RecurrentState:
        return RecurrentState(2)  # window, h

    def __call__(self, u, state: RecurrentState, span):
        window, h = state.arrays
        x, window = ops.short_conv(
            self.linear_x(u), self.conv_weight, self.conv_bias, window, silu=False, lengths=span.lengths
        )
        y, h = ops.diagonal_scan(*self._recurrence(x, span), h, span.lengths)
        state.arrays = [window, h]
        return self.linear_out(y.astype(u.dtype) * nn.gelu_approx(self.linear_y(u)))

    def _recurrence(self, x, span):
        """Decay and update [B, T, W] of the scan, in float32."""
        blocks = mx.unflatten(x, -1, (self.spec.heads, -1)).swapaxes(1, 2)  # [B, heads, T, block]
        opened = self._gate(blocks, self.input_gate_weight, self.input_gate_bias)
        log_decay = (
            -8.0
            * self._gate(blocks, self.recurrent_gate_weight, self.recurrent_gate_bias)
            * mx.logaddexp(self.recurrent_param, 0.0)
        )
        gain = mx.sqrt(-mx.expm1(2.0 * log_decay))
        if 0 in span.starts:  # a decay of 0 too would change nothing: those rows' states are still 0
            first = (mx.array(span.starts)[:, None] + mx.arange(span.T) == 0)[..., None]
            gain = mx.where(first, 1.0, gain)
        return mx.exp(log_decay), gain * opened * x.astype(mx.float32)

    def _gate(self, blocks, weight, bias):
        logits = (blocks @ weight).astype(mx.float32) + bias[:, None]
        return mx.sigmoid(logits).swapaxes(1, 2).flatten(2)
