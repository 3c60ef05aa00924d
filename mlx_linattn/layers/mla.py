from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from ..cuts import Block, columns, heads, rows
from ..spec import MlaSpec
from ..state import KVState
from .attend import attend
from .norm import RMSNorm
from .part import Part
from .rope import rotate


class HeadLinear(nn.Module):
    """One matrix per head, [H, out, in]: x [B, H, T, in] -> [B, H, T, out]."""

    def __init__(self, heads: int, inputs: int, outputs: int):
        super().__init__()
        self.weight = mx.zeros((heads, outputs, inputs))

    def __call__(self, x):
        return x @ self.weight.swapaxes(-1, -2)

    def to_quantized(self, group_size: int | None = None, bits: int | None = None, mode: str = "affine", **_):
        quantized = QuantizedHeadLinear(group_size, bits, mode)
        quantized.weight, quantized.scales, *biases = mx.quantize(self.weight, group_size, bits, mode=mode)
        if biases:
            quantized.biases = biases[0]
        return quantized


class QuantizedHeadLinear(nn.Module):
    def __init__(self, group_size: int | None, bits: int | None, mode: str):
        super().__init__()
        self.group_size, self.bits, self.mode = group_size, bits, mode
        self.freeze()

    def __call__(self, x):
        return mx.quantized_matmul(
            x, self["weight"], self["scales"], self.get("biases"), transpose=True,
            group_size=self.group_size, bits=self.bits, mode=self.mode,
        )  # fmt: skip


class LatentAttention(Part):
    """Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2") in absorbed form.

    With a latent c of each token, head h has keys W_k[h] c and values W_v[h] c. Since q . (W_k c) = (W_k^T q) . c and
    sum_j p_j W_v c_j = W_v sum_j p_j c_j, the heads attend over the latents themselves, as queries of one shared key head,
    and keys and values of single heads are never made.
    """

    def __init__(self, spec: MlaSpec, hidden_size: int):
        super().__init__()
        self.spec = spec
        queries = spec.heads * (spec.nope_dim + spec.rope_dim)
        if spec.query_rank is None:
            self.q_proj = nn.Linear(hidden_size, queries, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden_size, spec.query_rank, bias=False)
            self.q_a_layernorm = RMSNorm(spec.query_rank, spec.norm_eps)
            self.q_b_proj = nn.Linear(spec.query_rank, queries, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden_size, spec.rank + spec.rope_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(spec.rank, spec.norm_eps)
        self.embed_q = HeadLinear(spec.heads, spec.nope_dim, spec.rank)  # W_k^T
        self.unembed_out = HeadLinear(spec.heads, spec.rank, spec.value_dim)  # W_v
        values = spec.heads * spec.value_dim
        if spec.output_gate is not None:
            self.g_proj = nn.Linear(hidden_size, values if spec.output_gate == "feature" else spec.heads, bias=False)
        self.o_proj = nn.Linear(values, hidden_size, bias=False)

    @staticmethod
    def share(spec: MlaSpec, deal):
        return replace(spec, heads=deal.even(spec.heads, "heads"))

    @staticmethod
    def cuts(spec: MlaSpec):
        """The latents, which all heads read, every rank makes and keeps whole."""
        q, v, each = (
            Block(spec.heads, spec.nope_dim + spec.rope_dim),
            Block(spec.heads, spec.value_dim),
            Block(spec.heads),
        )
        return {
            "q_proj": rows(q), "q_b_proj": rows(q), "embed_q": heads(each), "unembed_out": heads(each),
            "g_proj": rows(v if spec.output_gate == "feature" else each), "o_proj": columns(v),
        }  # fmt: skip

    @staticmethod
    def state_cuts(spec: MlaSpec):
        return (None,)  # latents

    def make_state(self) -> KVState:
        return KVState()

    def __call__(self, x, state: KVState, span):
        spec = self.spec
        B, T, _ = x.shape
        q = self._query(x).reshape(B, T, spec.heads, -1).swapaxes(1, 2)  # [B, H, T, nope + rope]
        down = self.kv_a_proj_with_mqa(x)[:, None]  # [B, 1, T, rank + rope]
        latent = self.kv_a_layernorm(down[..., : spec.rank])
        latents = mx.concatenate([latent, rotate(down[..., spec.rank :], spec.rope, span)], axis=-1)
        q_nope, q_rope = q[..., : spec.nope_dim], rotate(q[..., spec.nope_dim :], spec.rope, span)
        q = mx.concatenate([self.embed_q(q_nope), q_rope], axis=-1)
        scale = (spec.nope_dim + spec.rope_dim) ** -0.5
        # The values are the latents without their rope part: taking them whole and dropping that part from the result
        # spares a copy of the context.
        o = attend(q, (latents,), state, span, scale)[..., : spec.rank]
        o = self.unembed_out(o).swapaxes(1, 2)  # [B, T, H, value_dim]
        if spec.output_gate is not None:
            gate = mx.sigmoid(self.g_proj(x).astype(mx.float32)).astype(o.dtype)
            o = o * gate.reshape(B, T, spec.heads, -1)
        return self.o_proj(o.reshape(B, T, -1))

    def _query(self, x):
        if self.spec.query_rank is None:
            return self.q_proj(x)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
