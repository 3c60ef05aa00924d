"""Launches of the recurrence kernels (metal/recurrence.metal, metal/chunked.metal): arguments, grid, template values."""

from __future__ import annotations

from math import gcd

import mlx.core as mx

from .. import metal
from .dispatch import device


def packed(q, k, v, decay, beta, state, delta, lengths, lanes=None):
    """Several lanes a row of the state, one token after another; arguments as :func:`recurrence.recurrence` documents."""
    B, T, Hv, Dv = v.shape
    Hk, Dk = k.shape[2:]
    lanes = lanes or (8 if Dk >= 128 else 4)  # at most 32 numbers of the state in a lane
    rows = 32 // lanes
    launch = metal.kernel("recurrence", device())
    return launch(
        inputs=[q, k, v, decay, beta, state, *_rows(B, T, lengths)],
        template=[
            ("KT", k.dtype), ("VT", v.dtype), ("Dk", Dk), ("Dv", Dv), ("Hk", Hk), ("Hv", Hv),
            ("LANES", lanes), ("VECTOR", decay.ndim == 4), ("DELTA", bool(delta)),
        ],
        grid=(32, Dv // rows, B * Hv),
        threadgroup=(32, gcd(4, Dv // rows), 1),
        output_shapes=[v.shape, state.shape],
        output_dtypes=[v.dtype, mx.float32],
    )  # fmt: skip


MEMORY = 32768  # threadgroup memory of an Apple GPU


def tile_bytes(C, Dk, size, vector, delta):
    """Threadgroup memory of metal/chunked.metal with chunks of C tokens and tiles of ``size`` bytes a number."""
    tiles = 2 * C * Dk * size + (C * Dk * 4 if vector else C * 4)
    squares = (2 if delta else 1) * C * C * 4
    return tiles + squares + 3 * C * 4 + (Dk * 4 if vector else 4) + 9 * 16  # each array starts at a multiple of 16


def chunk_for(Dk, size, vector, delta):
    """The most tokens a chunk can have: no more than 16 with a triangular solve, and what fits into the memory."""
    for C in (16, 8) if delta else (32, 16, 8):
        if tile_bytes(C, Dk, size, vector, delta) <= MEMORY:
            return C
    return None


def simdgroup(q, k, v, decay, beta, state, delta, lengths, chunk=None):
    """Chunks of tokens with 8x8 matrices; arguments as :func:`recurrence.recurrence` documents."""
    B, T, Hv, Dv = v.shape
    Hk, Dk = k.shape[2:]
    vector = decay.ndim == 4
    tile = mx.float32 if vector else k.dtype
    chunk = chunk or chunk_for(Dk, tile.size, vector, delta)
    launch = metal.kernel("chunked", device())
    return launch(
        inputs=[q, k, v, decay, beta, state, *_rows(B, T, lengths)],
        template=[
            ("KT", k.dtype), ("VT", v.dtype), ("TT", tile), ("Dk", Dk), ("Dv", Dv), ("Hk", Hk), ("Hv", Hv),
            ("C", chunk), ("VECTOR", vector), ("DELTA", bool(delta)),
        ],
        grid=(128, Dv // 32, B * Hv),
        threadgroup=(128, 1, 1),
        output_shapes=[v.shape, state.shape],
        output_dtypes=[v.dtype, mx.float32],
    )  # fmt: skip


def tensor_core(q, k, v, decay, beta, state, delta, lengths, chunk=32, warps=None):
    """metal/tensor_core*.cu: one kernel for all chunks of a segment at once, then one that walks them. CUDA only."""
    B, T, Hv, Dv = v.shape
    Hk, Dk = k.shape[2:]
    C, vector = chunk, decay.ndim == 4
    parts = 6 if vector else 0 if k.dtype == mx.bfloat16 else 4
    warps = warps or (2 if Dv % 64 or B * Hv * Dv < 64 * MULTIPROCESSORS else 4)
    lengths, _ = _rows(B, T, lengths)
    common = [
        ("Dk", Dk),
        ("Hk", Hk),
        ("Hv", Hv),
        ("C", C),
        ("PARTS", parts),
        ("VECTOR", vector),
        ("DELTA", bool(delta)),
    ]
    tiles = 3 * C * Dk * 4 if vector else (parts or 2) * C * (Dk + 8) * 2
    prepare = metal.kernel("tensor_core_prepare", "cuda", C * (C + 6) * 4 + tiles)
    stage = (parts or 2) * C * (Dk + 8) * 2 + 4 * C * (C + 8) * 2 + C * (16 * warps * v.dtype.size + 16)
    stage += ((Dk if vector else 2 * C) + C) * 4
    walk = metal.kernel("tensor_core", "cuda", 2 * stage)
    outputs, segment = [], max(SEGMENT // (B * Hv) // C * C, 1024)
    for start in range(0, T, segment):
        count = min(segment, T - start)
        N, shape = -(-count // C), mx.array([T, start, count], mx.int32)
        solved, operands, decays = prepare(
            inputs=[q, k, decay, beta, lengths, shape],
            template=[("KT", k.dtype), *common],
            grid=(128 * N, Hv, B),
            threadgroup=(128, 1, 1),
            output_shapes=[
                (B * Hv, N, 4, C, C),
                (B * (Hv if vector else Hk), N, parts, C, Dk) if parts else (1,),
                (B * Hv, N, Dk) if vector else (B * Hv, N, 2, C),
            ],
            output_dtypes=[mx.bfloat16, mx.bfloat16, mx.float32],
        )
        o, state = walk(
            inputs=[q, k, v, beta, state, solved, operands, decays, lengths, shape],
            template=[("KT", k.dtype), ("VT", v.dtype), ("Dv", Dv), ("WARPS", warps), *common],
            grid=(32 * warps, Dv // (16 * warps), B * Hv),
            threadgroup=(32 * warps, 1, 1),
            output_shapes=[(B, count, Hv, Dv), state.shape],
            output_dtypes=[v.dtype, mx.float32],
        )
        outputs.append(o)
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1), state


SEGMENT = 1 << 19  # tokens times heads that are prepared at once: at most 0.9 GB between the two kernels
MULTIPROCESSORS = 132  # of a GPU that should all have a block before blocks grow


def _rows(B, T, lengths):
    lengths = mx.full((B,), T, mx.int32) if lengths is None else lengths.astype(mx.int32)
    return lengths, mx.array([T], mx.int32)
