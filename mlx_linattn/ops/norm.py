"""Root-mean-square norms. Weights are float32 and already hold 1 + w where a checkpoint stores w."""

from __future__ import annotations

import mlx.core as mx

from . import dispatch, mixer_kernels
from .gates import sigmoid_gate, swiglu


def rms_norm(x, weight, eps: float, mean_square=None):
    """x / rms(x) * weight over the last axis, in float32, returned in x's dtype.

    ``mean_square`` [..., 1]: that of x and of what belongs to it elsewhere, where x is a part of what is normed.
    """
    if mean_square is not None:
        return (x.astype(mx.float32) * mx.rsqrt(mean_square + eps) * weight).astype(x.dtype)
    return mx.fast.rms_norm(x, weight, eps).astype(x.dtype)


def norm_then_gate(x, weight, gate, eps: float, activation: str, groups: int = 1, mean_square=None):
    """rms_norm(x) * weight * activation(gate): delta-rule and retention layers. Shapes [..., D], weight [D].

    With ``groups``, each of that many equal parts of D has a root mean square of its own. ``mean_square`` as in :func:`rms_norm`.
    """
    D = x.shape[-1] // groups
    if (
        mean_square is None
        and dispatch.choose(dispatch.Call("norm_then_gate", 1, x.size // D, D, dtype=x.dtype)).path == "rows"
    ):
        return mixer_kernels.gated_norm(x, weight, gate, eps, parts=groups, sigmoid=activation == "sigmoid")
    x32 = x.astype(mx.float32)
    if mean_square is not None:
        normed = rms_norm(x32, weight, eps, mean_square)
    elif groups == 1:
        normed = mx.fast.rms_norm(x32, weight, eps)
    else:
        normed = mx.fast.rms_norm(mx.unflatten(x32, -1, (groups, -1)), None, eps).reshape(x.shape) * weight
    gated = sigmoid_gate if activation == "sigmoid" else swiglu_of
    return gated(normed, gate.astype(mx.float32)).astype(x.dtype)


def swiglu_of(x, gate):
    return swiglu(gate, x)


def gate_then_norm(x, weight, gate, eps: float, groups: int = 1):
    """rms_norm(x * silu(gate)) * weight, the mean taken over each of ``groups`` equal parts of the last axis: Mamba-2.

    x, gate [..., D]; weight [D]. Returns x's shape and dtype, computed in float32.
    """
    D = x.shape[-1] // groups
    if dispatch.choose(dispatch.Call("gate_then_norm", 1, x.size // D, D, dtype=x.dtype)).path == "rows":
        return mixer_kernels.gated_norm(x, weight, gate, eps, parts=groups, before=True)
    opened = swiglu(gate.astype(mx.float32), x.astype(mx.float32))
    parts = opened.reshape(*x.shape[:-1], groups, D)
    return (mx.fast.rms_norm(parts, None, eps).reshape(x.shape) * weight).astype(x.dtype)


def l2_normalize(x, eps: float = 1e-6):
    """x / sqrt(sum(x^2) + eps) over the last axis, in float32."""
    D = x.shape[-1]
    return mx.fast.rms_norm(x.astype(mx.float32), None, eps / D) * D**-0.5
