"""Root-mean-square norms. Weights are float32 and already hold 1 + w where a checkpoint stores w."""

from __future__ import annotations

import mlx.core as mx

from . import dispatch, mixer_kernels


def rms_norm(x, weight, eps: float):
    """x / rms(x) * weight over the last axis, in float32, returned in x's dtype."""
    return mx.fast.rms_norm(x, weight, eps).astype(x.dtype)


def norm_then_gate(x, weight, gate, eps: float, activation: str):
    """rms_norm(x) * weight * activation(gate): delta-rule and retention layers. Shapes [..., D], weight [D]."""
    call = dispatch.Call("norm_then_gate", 1, x.size // x.shape[-1], x.shape[-1], dtype=x.dtype)
    if dispatch.choose(call).path == "rows":
        return mixer_kernels.gated_norm(x, weight, gate, eps, sigmoid=activation == "sigmoid")
    gate32 = gate.astype(mx.float32)
    opened = mx.sigmoid(gate32) if activation == "sigmoid" else gate32 * mx.sigmoid(gate32)
    return (mx.fast.rms_norm(x.astype(mx.float32), weight, eps) * opened).astype(x.dtype)


def gate_then_norm(x, weight, gate, eps: float, groups: int = 1):
    """rms_norm(x * silu(gate)) * weight, the mean taken over each of ``groups`` equal parts of the last axis: Mamba-2.

    x, gate [..., D]; weight [D]. Returns x's shape and dtype, computed in float32.
    """
    D = x.shape[-1] // groups
    if dispatch.choose(dispatch.Call("gate_then_norm", 1, x.size // D, D, dtype=x.dtype)).path == "rows":
        return mixer_kernels.gated_norm(x, weight, gate, eps, parts=groups, before=True)
    gate32 = gate.astype(mx.float32)
    opened = x.astype(mx.float32) * (gate32 * mx.sigmoid(gate32))
    parts = opened.reshape(*x.shape[:-1], groups, D)
    return (mx.fast.rms_norm(parts, None, eps).reshape(x.shape) * weight).astype(x.dtype)


def l2_normalize(x, eps: float = 1e-6):
    """x / sqrt(sum(x^2) + eps) over the last axis, in float32."""
    D = x.shape[-1]
    return mx.fast.rms_norm(x.astype(mx.float32), None, eps / D) * D**-0.5
