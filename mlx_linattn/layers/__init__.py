"""Layers read specs and call ops; they know no model family."""

from __future__ import annotations

import mlx.nn as nn

from ..spec import (
    AttentionSpec,
    GatedDeltaSpec,
    KdaSpec,
    LayerSpec,
    LightningSpec,
    LinearAttentionSpec,
    MambaSpec,
    MlaSpec,
    MlpSpec,
    MoeSpec,
    ResidualSpec,
    RgLruSpec,
)
from .attention import Attention
from .gated_delta import GatedDelta
from .kda import KimiDelta
from .lightning import Lightning
from .linear_attention import LinearAttention
from .mamba import Mamba
from .mla import LatentAttention
from .mlp import Mlp
from .moe import Moe
from .norm import RMSNorm
from .part import ALONE, Part, Ranks
from .residual import ResidualMix
from .rg_lru import RgLru

BUILDS = {
    AttentionSpec: Attention,
    GatedDeltaSpec: GatedDelta,
    KdaSpec: KimiDelta,
    LightningSpec: Lightning,
    LinearAttentionSpec: LinearAttention,
    MambaSpec: Mamba,
    MlaSpec: LatentAttention,
    MlpSpec: Mlp,
    MoeSpec: Moe,
    RgLruSpec: RgLru,
}


class Layer(nn.Module):
    """One mixer and one MLP, each joined to the residual stream as its ResidualSpec says."""

    def __init__(self, spec: LayerSpec, hidden_size: int, norm_eps: float):
        super().__init__()
        self.spec = spec
        self.mixer_norm = RMSNorm(hidden_size, norm_eps)
        self.mixer = BUILDS[type(spec.mixer)](spec.mixer, hidden_size)
        if spec.mlp is not None:
            self.mlp_norm = RMSNorm(hidden_size, norm_eps)
            self.mlp = BUILDS[type(spec.mlp)](spec.mlp, hidden_size)
        if spec.mixer_residual.norm == "mixed":
            self.mixer_mix, self.mlp_mix = ResidualMix(hidden_size, norm_eps), ResidualMix(hidden_size, norm_eps)

    def __call__(self, x, state, span, dtype=None):
        """x [B, T, H] -> [B, T, H]; ``dtype`` is what the sub-layers compute in, where the residual stream is wider.

        With mixed residuals, x is (blocks, sum): see ResidualSpec.
        """
        dtype = dtype or x.dtype
        mixer, mlp = self.mixer, None if self.spec.mlp is None else self.mlp

        def mix(y):
            return mixer.ranks.sum(mixer(y.astype(dtype), state, span))

        x = self._join("mixer", x, mix, self.spec.mixer_residual)
        if mlp is None:
            return x
        return self._join("mlp", x, lambda y: mlp.ranks.sum(mlp(y.astype(dtype))), self.spec.mlp_residual)

    def _join(self, name: str, x, f, residual: ResidualSpec):
        norm = self[f"{name}_norm"]
        if residual.norm == "before":
            return x + f(norm(x))
        if residual.norm == "after":
            return x + norm(f(x))
        if residual.norm == "mixed":
            blocks, total = x
            y = f(norm(self[f"{name}_mix"](blocks, total)))
            return ((*blocks, total), y) if residual.starts_block else (blocks, total + y)
        carried = norm(x)
        return residual.alpha * carried + residual.beta * f(carried)


__all__ = ["ALONE", "BUILDS", "Layer", "Part", "RMSNorm", "Ranks", "ResidualMix"]
