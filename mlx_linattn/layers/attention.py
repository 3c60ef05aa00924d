from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from .. import ops
from ..cuts import Block, columns, heads, rows
from ..spec import AttentionSpec
from ..state import KVState, WindowState
from .attend import attend
from .norm import RMSNorm
from .part import Part
from .rope import rotate


class Attention(Part):
    """Grouped-query softmax attention, optionally with per-head norms of q and k and a sigmoid output gate."""

    def __init__(self, spec: AttentionSpec, hidden_size: int):
        super().__init__()
        self.spec = spec
        queries = spec.heads * spec.head_dim
        self.q_proj = nn.Linear(hidden_size, queries * (2 if spec.output_gate else 1), bias=spec.bias)
        self.k_proj = nn.Linear(hidden_size, spec.kv_heads * spec.head_dim, bias=spec.bias)
        self.v_proj = nn.Linear(hidden_size, spec.kv_heads * spec.head_dim, bias=spec.bias)
        self.o_proj = nn.Linear(queries, hidden_size, bias=spec.bias or spec.output_bias)
        if spec.qk_norm:
            self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps)
            self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps)
        if spec.qk_norm_full:
            self.q_norm = RMSNorm(queries, spec.norm_eps)
            self.k_norm = RMSNorm(spec.kv_heads * spec.head_dim, spec.norm_eps)

    @staticmethod
    def share(spec: AttentionSpec, deal):
        return replace(spec, heads=deal.even(spec.heads, "heads"), kv_heads=deal.spread(spec.kv_heads, "key heads"))

    @staticmethod
    def cuts(spec: AttentionSpec):
        q, kv = Block(spec.heads, spec.head_dim), Block(spec.kv_heads, spec.head_dim)
        found = {"q_proj": rows(q), "k_proj": rows(kv), "v_proj": rows(kv), "o_proj": columns(q)}
        if spec.output_gate:
            found["q_proj"] = rows(Block(spec.heads, 2 * spec.head_dim))
        return found | ({"q_norm": columns(q), "k_norm": columns(kv)} if spec.qk_norm_full else {})

    @staticmethod
    def state_cuts(spec: AttentionSpec):
        return (heads(Block(spec.kv_heads)),)  # keys, values

    def make_state(self) -> KVState | WindowState:
        return KVState() if self.spec.window is None else WindowState(self.spec.window)

    def __call__(self, x, state: KVState | WindowState, span):
        spec = self.spec
        B, T, _ = x.shape
        q, k = self.q_proj(x), self.k_proj(x)
        if spec.qk_norm_full:
            of_q, of_k = self.ranks.mean_square(q, k)
            q, k = self.q_norm(q, of_q), self.k_norm(k, of_k)
        q = q.reshape(B, T, spec.heads, -1)
        if spec.output_gate:  # each head's rows are [query | gate]
            q, gate = mx.split(q, 2, axis=-1)
        k = k.reshape(B, T, spec.kv_heads, spec.head_dim)
        v = self.v_proj(x).reshape(B, T, spec.kv_heads, spec.head_dim).swapaxes(1, 2)
        if spec.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (rotate(y.swapaxes(1, 2), spec.rope, span) for y in (q, k))  # [B, heads, T, D]
        o = attend(q, (k, v), state, span, spec.head_dim**-0.5)
        o = o.swapaxes(1, 2).reshape(B, T, -1)
        return self.o_proj(ops.sigmoid_gate(o, gate.reshape(B, T, -1)) if spec.output_gate else o)
