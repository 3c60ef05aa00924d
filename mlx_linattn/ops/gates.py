"""Decays and write strengths of the delta-rule layers, always in float32."""

from __future__ import annotations

from functools import partial

import mlx.core as mx

fused = partial(mx.compile, shapeless=True)  # chains of elementwise operations become one pass


def delta_decay(a, A_log, dt_bias, lower_bound: float | None = None):
    """Linear decay in [0, 1] of a gated-delta layer.

    plain gate    exp(-exp(A_log) softplus(a + dt_bias))                 (Gated DeltaNet; Kimi-Linear)
    lower bound   exp(lower_bound sigmoid(exp(A_log) (a + dt_bias)))     (Kimi-K3, Ling-3: never below exp(lower_bound))

    a is [B, T, Hv] or [B, T, Hv, Dk]; A_log [Hv]; dt_bias as a's trailing axes. Returns a's shape in float32.
    """
    A_log = A_log.astype(mx.float32).reshape(-1, *[1] * (a.ndim - 3))
    a, dt_bias = a.astype(mx.float32), dt_bias.astype(mx.float32)
    return (
        _decay(a, A_log, dt_bias) if lower_bound is None else _bounded_decay(a, A_log, dt_bias, mx.array(lower_bound))
    )


@fused
def _decay(a, A_log, dt_bias):
    return mx.exp(-mx.exp(A_log) * mx.logaddexp(a + dt_bias, 0.0))


@fused
def _bounded_decay(a, A_log, dt_bias, lower_bound):
    return mx.exp(lower_bound * mx.sigmoid(mx.exp(A_log) * (a + dt_bias)))


def write_strength(b, scale: float = 1.0):
    """beta = scale * sigmoid(b) in float32; scale 2 lets the state have negative eigenvalues (Grazzi et al. 2024)."""
    beta = mx.sigmoid(b.astype(mx.float32))
    return beta if scale == 1.0 else scale * beta


@fused
def silu(x):
    return x * mx.sigmoid(x)


@fused
def swiglu(gate, up):
    return gate * mx.sigmoid(gate) * up


@fused
def sigmoid_gate(x, gate):
    return x * mx.sigmoid(gate)
