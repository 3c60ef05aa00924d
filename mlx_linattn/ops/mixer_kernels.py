"""Launches of the kernels round the recurrence: the fused step, the short convolution, the gated norms."""

from __future__ import annotations

from functools import lru_cache
from math import gcd

import mlx.core as mx

from .. import metal
from .dispatch import device

STEP_TOKENS = 8  # the longest T of the fused step (dispatch.step_fits)
MEMORY = 32768  # bytes of threadgroup memory a kernel may take


def step_memory(tokens: int, Dk: int, Dv: int, vector: bool) -> int:
    """Bytes of threadgroup memory that metal/delta_step.metal takes for this many tokens."""
    return 4 * tokens * (2 * Dk + Dv + 1) + 16 * -(-tokens * (Dk if vector else 1) // 4)


def delta_step(
    qkv, a, b, z, *, conv_weight, A_log, dt_bias, norm_weight, window, state, key_heads, value_heads, key_dim, value_dim,
    lower_bound, beta_scale, output_gate, eps, lengths, snapshots, threads=256, lanes=8,
):  # fmt: skip
    """delta_mixer in one dispatch (two where eight tokens do not fit into threadgroup memory); arguments as there."""
    B, T, C = qkv.shape
    K, vector = conv_weight.shape[1], a is not None and a.shape[-1] != value_heads
    most = 1 if T == 1 else STEP_TOKENS
    while step_memory(most, key_dim, value_dim, vector) > MEMORY:
        most //= 2
    window = mx.zeros((B, K - 1, C), qkv.dtype) if window is None else window.astype(qkv.dtype)
    state = mx.zeros((B, value_heads, value_dim, key_dim)) if state is None else state
    if key_dim > 128:  # a wide state in more threads would not fit into an Apple core's registers
        threads = min(threads, 256)
    threads = gcd(threads, value_dim * lanes)
    launch = metal.kernel("delta_step", device())
    template = [
        ("YT", qkv.dtype), ("Dk", key_dim), ("Dv", value_dim), ("Hk", key_heads), ("Hv", value_heads), ("K", K),
        ("TM", most), ("THREADS", threads), ("LANES", lanes), ("DECAYS", a is not None),
        ("VECTOR", vector), ("BOUNDED", lower_bound is not None),
        ("OPENS", z is not None), ("SIGMOID", output_gate == "sigmoid"), ("EVERY", bool(snapshots)),
    ]  # fmt: skip
    # What a kernel does not read is some other array: it needs an address.
    a, A_log, dt_bias = (b, b, b) if a is None else (a, A_log, dt_bias)
    z = qkv if z is None else z
    parts = []
    for start in range(0, T, most):
        piece = slice(start, min(start + most, T))
        size = piece.stop - start
        each = (B, size) if snapshots else (B,)
        out = launch(
            inputs=[
                *(x if size == T else x[:, piece] for x in (qkv, a, b, z)),
                conv_weight, A_log, dt_bias, norm_weight, window, state,
                numbers(mx.int32, *[size] * B) if lengths is None else (lengths - start).astype(mx.int32),
                numbers(mx.int32, size),
                numbers(mx.float32, eps, lower_bound or 0.0, beta_scale),
            ],
            template=template,
            grid=(threads * B * value_heads, 1, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[(B, size, value_heads * value_dim), (*each, K - 1, C), (*each, *state.shape[1:])],
            output_dtypes=[qkv.dtype, qkv.dtype, mx.float32],
        )  # fmt: skip
        parts.append(out)
        window, state = (out[1][:, -1], out[2][:, -1]) if snapshots else out[1:]
    if len(parts) == 1:
        return tuple(parts[0])
    y, windows, states = (
        mx.concatenate(x, axis=1) if i == 0 or snapshots else x[-1] for i, x in enumerate(zip(*parts))
    )
    return y, windows, states


def short_conv(x, weight, bias, window, silu, lengths):
    """conv.short_conv in one dispatch (metal/short_conv.metal); arguments as there, all in place."""
    B, T, C = x.shape
    K = weight.shape[1]
    tokens = 1 if T == 1 else 8
    return metal.kernel("short_conv", device())(
        inputs=[
            x, weight, weight if bias is None else bias, window,
            numbers(mx.int32, *[T] * B) if lengths is None else lengths.astype(mx.int32), numbers(mx.int32, T, C),
        ],
        template=[("YT", x.dtype), ("K", K), ("TOKENS", tokens), ("BIAS", bias is not None), ("SILU", silu)],
        grid=(-(-C // 128) * 128, -(-T // tokens), B),
        threadgroup=(128, 1, 1),
        output_shapes=[x.shape, (B, K - 1, C)],
        output_dtypes=[x.dtype, x.dtype],
    )  # fmt: skip


def gated_norm(x, weight, gate, eps, parts=1, before=False, sigmoid=False):
    """norm.norm_then_gate, or with ``before`` norm.gate_then_norm, in one dispatch (metal/gated_norm.metal)."""
    D = x.shape[-1] // parts
    rows = x.size // D
    groups = 1
    while groups < 32 and 256 * groups < D:
        groups *= 2
    return metal.kernel("gated_norm", device())(
        inputs=[x, gate, weight, numbers(mx.float32, eps)],
        template=[
            ("XT", x.dtype), ("D", D), ("PARTS", parts), ("GROUPS", groups), ("BEFORE", before), ("SIGMOID", sigmoid)
        ],
        grid=(32 * groups, rows, 1),
        threadgroup=(32 * groups, gcd(rows, 8) if groups == 1 else 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[x.dtype],
    )[0]  # fmt: skip


@lru_cache(maxsize=256)
def numbers(dtype, *values) -> mx.array:
    """A small array that is made once, so that it costs no dispatch in a step."""
    return mx.array(values, dtype)
