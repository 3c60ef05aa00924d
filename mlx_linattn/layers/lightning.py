from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from .. import ops
from ..cuts import Block, columns, heads, rows
from ..spec import LightningSpec
from ..state import RecurrentState
from .norm import RMSNorm
from .part import Part
from .rope import rotate


class Lightning(Part):
    """Lightning attention (Qin et al. 2024). Its state is one float32 matrix per head."""

    float32 = ("norm_weight",)

    def __init__(self, spec: LightningSpec, hidden_size: int):
        super().__init__()
        self.spec = spec
        self.qkv_proj = nn.Linear(hidden_size, 3 * spec.width, bias=spec.bias)  # rows [q | k | v], heads inside each
        self.g_proj = nn.Linear(hidden_size, spec.width, bias=False)
        self.norm_weight = mx.ones((spec.width,))
        self.out_proj = nn.Linear(spec.width, hidden_size, bias=False)
        if spec.qk_norm_eps is not None:
            self.q_norm = RMSNorm(spec.head_dim, spec.qk_norm_eps)
            self.k_norm = RMSNorm(spec.head_dim, spec.qk_norm_eps)
        # float32 in every model: half precision keeps 8 or 11 bits of a number close to 1, and loses what it decays by.
        self._decay = mx.array(spec.decay, mx.float32)

    @staticmethod
    def share(spec: LightningSpec, deal):
        first, end = deal.range(spec.heads)
        shared = spec.norm_groups == 1
        return replace(
            spec,
            heads=deal.even(spec.heads, "heads"),
            decay=spec.decay[first:end],
            norm_groups=1 if shared else deal.even(spec.norm_groups, "groups of the output norm"),
            norm_shared=shared,
        )

    @staticmethod
    def cuts(spec: LightningSpec):
        each = Block(spec.heads, spec.head_dim)
        whole = {"g_proj": rows(each), "norm_weight": columns(each), "out_proj": columns(each)}
        return {"qkv_proj": rows(each, each, each), **whole}

    @staticmethod
    def state_cuts(spec: LightningSpec):
        return (heads(Block(spec.heads)),)

    def make_state(self) -> RecurrentState:
        return RecurrentState(1)

    def __call__(self, x, state: RecurrentState, span):
        spec = self.spec
        B, T, _ = x.shape
        qkv = self.qkv_proj(x)
        qkv = ops.silu(qkv) if spec.silu else qkv
        q, k, v = (y.reshape(B, T, spec.heads, spec.head_dim) for y in mx.split(qkv, 3, axis=-1))
        if spec.qk_norm_eps is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if spec.rope is not None:
            q, k = (rotate(y.swapaxes(1, 2), spec.rope, span).swapaxes(1, 2) for y in (q, k))
        if spec.scale != 1.0:
            q = q.astype(mx.float32) * spec.scale
        o, state.arrays[0] = ops.recurrence(
            q, k, v, self._decay, None, state.arrays[0], delta=False, lengths=span.lengths
        )
        o, gate = o.reshape(B, T, -1), self.g_proj(x)
        (mean_square,) = self.ranks.mean_square(o) if spec.norm_shared else (None,)
        y = ops.norm_then_gate(
            o, self.norm_weight, gate, spec.norm_eps, "sigmoid", groups=spec.norm_groups, mean_square=mean_square
        )
        return self.out_proj(y)
