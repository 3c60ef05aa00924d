from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from ..cuts import Block, columns, nested
from ..spec import MlpSpec, MoeSpec
from .mlp import Mlp, limited_swiglu
from .norm import RMSNorm
from .part import Part


class ExpertLinear(nn.Module):
    """One matrix per expert, [E, out, in]; each row of x goes through the expert that ``experts`` names for it."""

    def __init__(self, experts: int, inputs: int, outputs: int):
        super().__init__()
        self.weight = mx.zeros((experts, outputs, inputs))

    def __call__(self, x, experts, is_sorted: bool):
        """x [N, 1, in], experts [N] -> [N, 1, out]."""
        weight = self.weight
        if weight.dtype != mx.float32 and mx.default_device() == mx.cpu:
            return self._on_cpu(x, experts)
        return mx.gather_mm(x, weight.swapaxes(-1, -2), rhs_indices=experts, sorted_indices=is_sorted)

    def _on_cpu(self, x, experts):
        """MLX gathers matrices on the CPU in float32 only: widen the experts in use, or all when there are more rows."""
        weight = self.weight
        if experts.size < weight.shape[0]:
            return (x.astype(mx.float32) @ weight[experts].astype(mx.float32).swapaxes(-1, -2)).astype(x.dtype)
        wide = weight.astype(mx.float32).swapaxes(-1, -2)
        return mx.gather_mm(x.astype(mx.float32), wide, rhs_indices=experts).astype(x.dtype)

    def to_quantized(self, group_size: int | None = None, bits: int | None = None, mode: str = "affine", **_):
        quantized = QuantizedExpertLinear(group_size, bits, mode)
        quantized.weight, quantized.scales, *biases = mx.quantize(self.weight, group_size, bits, mode=mode)
        if biases:
            quantized.biases = biases[0]
        return quantized


class QuantizedExpertLinear(nn.Module):
    def __init__(self, group_size: int | None, bits: int | None, mode: str):
        super().__init__()
        self.group_size, self.bits, self.mode = group_size, bits, mode
        self.freeze()

    def __call__(self, x, experts, is_sorted: bool):
        return mx.gather_qmm(
            x, self["weight"], self["scales"], self.get("biases"), rhs_indices=experts, transpose=True,
            group_size=self.group_size, bits=self.bits, mode=self.mode, sorted_indices=is_sorted,
        )  # fmt: skip


class Experts(nn.Module):
    def __init__(self, spec: MoeSpec, width: int):
        super().__init__()
        self.limits = spec.limit, spec.soft_limits
        self.gate_proj = ExpertLinear(spec.experts, width, spec.size)
        self.up_proj = ExpertLinear(spec.experts, width, spec.size)
        self.down_proj = ExpertLinear(spec.experts, spec.size, width)

    def __call__(self, x, chosen):
        """x [N, H], chosen [N, top_k] -> [N, top_k, H]."""
        N, top_k = chosen.shape
        # Rows of one token, made before they are gathered: MLX on CUDA (0.32.4) misreads a gathered view with a new axis.
        x, experts = x[:, None], chosen.reshape(-1)
        is_sorted = N * top_k >= 64  # then rows of one expert lie together and its matrix is read once
        if is_sorted:
            order = mx.argsort(experts)
            experts, rows = experts[order], x[order // top_k]
        else:
            rows = mx.repeat(x, top_k, axis=0)
        gate, up = self.gate_proj(rows, experts, is_sorted), self.up_proj(rows, experts, is_sorted)
        y = limited_swiglu(gate, up, *self.limits)
        y = self.down_proj(y, experts, is_sorted)[:, 0]
        if is_sorted:
            y = y[mx.argsort(order)]
        return y.reshape(N, top_k, -1)


class Router(nn.Module):
    """Scores of the experts, in float32: a rounded score can choose another expert."""

    float32 = ("weight",)

    def __init__(self, hidden_size: int, experts: int):
        super().__init__()
        self.weight = mx.zeros((experts, hidden_size))

    def __call__(self, x):
        return x.astype(mx.float32) @ self.weight.T

    def to_quantized(self, group_size: int | None = None, bits: int | None = None, mode: str = "affine", **_):
        experts, hidden_size = self.weight.shape
        return QuantizedRouter(hidden_size, experts, False, group_size, bits, mode)


class QuantizedRouter(nn.QuantizedLinear):
    def __call__(self, x):
        return super().__call__(x.astype(mx.float32))


def _shared(spec: MoeSpec) -> MlpSpec:
    return MlpSpec(spec.shared_size, limit=spec.shared_limit, soft_limits=spec.soft_limits)


class Moe(Part):
    def __init__(self, spec: MoeSpec, hidden_size: int):
        super().__init__()
        self.spec = spec
        self.gate = Router(hidden_size, spec.experts)
        self.switch_mlp = Experts(spec, spec.latent_size or hidden_size)
        if spec.latent_size is not None:
            self.latent_down = nn.Linear(hidden_size, spec.latent_size, bias=False)
            self.latent_up = nn.Linear(spec.latent_size // spec.latent_parts, hidden_size, bias=False)
        if spec.latent_norm_eps is not None:
            self.latent_norm = RMSNorm(spec.latent_size, spec.latent_norm_eps)
        if spec.correction_bias:
            self.correction_bias = mx.zeros((spec.experts,))
        if spec.shared_size:
            self.shared_expert = Mlp(_shared(spec), hidden_size)
        if spec.shared_gate:
            self.shared_expert_gate = Router(hidden_size, 1)

    float32 = ("correction_bias",)

    @staticmethod
    def share(spec: MoeSpec, deal):
        parts = 1
        if spec.latent_size is not None:
            parts = spec.latent_size // deal.even(spec.latent_size, "latent features")
        size, shared_size = (
            deal.even(spec.size, "features of an expert"),
            deal.even(spec.shared_size, "shared features"),
        )
        return replace(spec, size=size, shared_size=shared_size, latent_parts=parts)

    @staticmethod
    def cuts(spec: MoeSpec):
        """A part of every expert: whichever are chosen, all ranks have the same work."""
        cuts = nested("switch_mlp", Mlp.cuts(spec))
        if spec.shared_size:
            cuts |= nested("shared_expert", Mlp.cuts(_shared(spec)))
        if spec.latent_size is not None:
            cuts["latent_up"] = columns(Block(spec.latent_size))
        return cuts

    def __call__(self, x):
        shape, x = x.shape, x.reshape(-1, x.shape[-1])
        chosen, weights = self.route(x)
        latent = x if self.spec.latent_size is None else self.latent_down(x)
        y = (self.switch_mlp(latent, chosen) * weights[..., None].astype(x.dtype)).sum(1)
        if self.spec.latent_size is not None:
            y = self.ranks.sum(y)
            if self.spec.latent_norm_eps is not None:
                y = self.latent_norm(y)
            y = self.latent_up(self.ranks.own(y))
        if self.spec.shared_size:
            shared = self.shared_expert(x)
            if self.spec.shared_gate:
                shared = mx.sigmoid(self.shared_expert_gate(x)).astype(x.dtype) * shared
            y = y + shared
        return y.reshape(shape)

    def route(self, x):
        """The experts [N, top_k] of each token of x [N, H], and their weights in float32."""
        spec = self.spec
        logits = self.gate(x)
        scores = mx.softmax(logits, axis=-1) if spec.router == "softmax" else mx.sigmoid(logits)
        worth = scores + self.correction_bias if spec.correction_bias else scores
        if spec.top_groups < spec.groups:
            worth = self._only_best_groups(worth)
        chosen = mx.argpartition(-worth, kth=spec.top_k - 1, axis=-1)[:, : spec.top_k]
        weights = mx.take_along_axis(scores, chosen, axis=-1)
        if spec.renormalize:
            weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
        return chosen, weights * spec.scaling

    def _only_best_groups(self, worth):
        spec = self.spec
        grouped = worth.reshape(len(worth), spec.groups, -1)
        best_two = mx.topk(grouped, 2, axis=-1).sum(-1)  # [N, groups]
        bar = mx.min(mx.topk(best_two, spec.top_groups, axis=-1), axis=-1, keepdims=True)
        return mx.where((best_two >= bar)[..., None], grouped, -mx.inf).reshape(worth.shape)
