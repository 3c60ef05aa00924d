"""Recurrences whose state is one number per channel: the diagonal scan (RG-LRU) and Mamba-1's selective scan.

Both plain-MLX paths cut T into chunks that advance together, a token of every chunk at a time: once from a zero state to
learn what each chunk adds, then, the chunks' own starts being known, once for the outputs. Decays only ever multiply: a
decay of 0 is exact, and nothing is divided by a product that has vanished.
"""

from __future__ import annotations

import math

import mlx.core as mx

from ..errors import ShapeError
from . import dispatch, reference, scan_kernels

GROUP = 1 << 20  # elements of one temporary of the selective scan
#: e^x is computed as 2^(x log2 e) by mx.power: MLX's exp is three times slower on x86 CPUs, and wrong in the sixth digit.
LOG2_E = math.log2(math.e)


def diagonal_scan(decay, update, state=None, lengths=None):
    """h_t = decay_t * h_{t-1} + update_t, channel by channel, in float32 (RG-LRU: De et al. 2024, "Griffin").

    Args:
        decay: [B, T, W], linear, in [0, 1].  update: [B, T, W].
        state: [B, W] float32, h before the first token; None for zeros.
        lengths: [B] integers; tokens at and after a row's length change nothing, and their outputs mean nothing.

    Returns:
        h [B, T, W] in update's dtype, and the new state [B, W] in float32.

    Raises:
        ShapeError: shapes that do not fit together.
    """
    B, T, W = update.shape
    _expect("diagonal_scan", "decay", decay, (B, T, W))
    state = mx.zeros((B, W)) if state is None else state
    _expect("diagonal_scan", "state", state, (B, W))
    row = dispatch.choose(dispatch.Call("diagonal_scan", T, -(-B * W // 32), dtype=update.dtype))
    return DIAGONAL[row.path](decay, update, state.astype(mx.float32), lengths, **row.options)


def selective_scan(x, delta, A, B, C, D=None, state=None, lengths=None):
    """h_t = exp(delta_t A) h_{t-1} + delta_t x_t B_t,  y_t = C_t . h_t + D x_t  (Mamba-1: Gu and Dao 2023), in float32.

    Args:
        x: [B, T, inner].  delta: [B, T, inner], the step size after its softplus.
        A: [inner, N], negative.  B, C: [B, T, N].  D: [inner] or None.
        state: [B, inner, N] float32, h before the first token; None for zeros.
        lengths: [B] integers; tokens at and after a row's length change nothing, and their outputs mean nothing.

    Returns:
        y [B, T, inner] in x's dtype, and the new state [B, inner, N] in float32.

    Raises:
        ShapeError: shapes that do not fit together.
    """
    rows, T, inner = x.shape
    N = A.shape[-1]
    state = mx.zeros((rows, inner, N)) if state is None else state
    for name, array, shape in (
        ("delta", delta, (rows, T, inner)),
        ("A", A, (inner, N)),
        ("B", B, (rows, T, N)),
        ("C", C, (rows, T, N)),
        ("state", state, (rows, inner, N)),
    ):
        _expect("selective_scan", name, array, shape)
    call = dispatch.Call("selective_scan", T, -(-rows * inner // 32), N, dtype=x.dtype)
    row = dispatch.choose(call)
    return SELECTIVE[row.path](x, delta, A, B, C, D, state.astype(mx.float32), lengths, **row.options)


def _plain_diagonal(run):
    def path(decay, update, state, lengths):
        a, u = decay.astype(mx.float32), update.astype(mx.float32)
        if lengths is not None:
            real = (mx.arange(u.shape[1]) < lengths[:, None])[..., None]
            a, u = mx.where(real, a, 1.0), mx.where(real, u, 0.0)
        h, state = run(a, u, state)
        if u.shape[1] > 1:  # a buffer of its own: MLX may have computed the state in a larger one that was free
            state = mx.take(h, mx.array([u.shape[1] - 1]), axis=1)[:, 0]
        return h.astype(update.dtype), state

    return path


def _plain_selective(run):
    def path(x, delta, A, B, C, D, state, lengths):
        x32, delta, A, B, C = (array.astype(mx.float32) for array in (x, delta, A, B, C))
        if lengths is not None:  # a step of size 0 decays nothing and adds nothing
            delta = mx.where((mx.arange(x.shape[1]) < lengths[:, None])[..., None], delta, 0.0)
        y, state = run(x32, delta, A, B, C, state)
        y = y if D is None else y + D.astype(mx.float32) * x32
        return y.astype(x.dtype), state

    return path


def _scan(a, u, h):
    """a, u [B, T, ...], h [B, ...]; all float32."""
    B, T, *rest = u.shape
    if T < 8:
        return reference.diagonal_scan(a, u, h)
    steps = 1 << (T.bit_length() // 2)  # tokens of a chunk, about the square root of T
    chunks = T // steps
    whole = chunks * steps
    a_chunks, u_chunks = (x[:, :whole].reshape(B, chunks, steps, *rest) for x in (a, u))
    ends, last = _scan(mx.prod(a_chunks, axis=2), _end_of(a_chunks, u_chunks), h)
    h = mx.concatenate([h[:, None], ends[:, :-1]], axis=1)
    outputs = []
    for i in range(steps):
        h = a_chunks[:, :, i] * h + u_chunks[:, :, i]
        outputs.append(h)
    y = mx.stack(outputs, axis=2).reshape(B, whole, *rest)
    if whole == T:
        return y, last
    tail, last = _scan(a[:, whole:], u[:, whole:], last)
    return mx.concatenate([y, tail], axis=1), last


def _end_of(decay, update):
    """What each chunk adds to the state, from zero; [B, chunks, steps, ...] -> [B, chunks, ...]."""
    added = update[:, :, 0]
    for i in range(1, update.shape[2]):
        added = decay[:, :, i] * added + update[:, :, i]
    return added


def _selective(x, delta, A, B, C, state):
    """Groups of tokens one after another, so that a temporary of T * inner * N numbers never exists."""
    rows, T, inner = x.shape
    N = A.shape[1]
    added = delta * x
    delta = LOG2_E * delta
    if T == 1:
        h = mx.power(2.0, delta[:, 0, :, None] * A) * state + added[:, 0, :, None] * B
        return C @ h.swapaxes(1, 2), h
    A = A.T  # inner is the last axis from here on: N is too short for a vector unit
    h = state.swapaxes(1, 2)  # [B, N, inner]
    size = max(GROUP // (rows * inner * N), 8)
    outputs = []
    for start in range(0, T, size):
        group = slice(start, min(start + size, T))
        y, h = _selective_group(added[:, group], delta[:, group], A, B[:, group], C[:, group], h)
        outputs.append(y)
    y = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1)
    return y, mx.contiguous(h.swapaxes(1, 2))


def _selective_group(added, delta, A, B, C, h):
    rows, T, inner = delta.shape
    steps = 1 << (T.bit_length() // 2)
    chunks = -(-T // steps)

    def chunked(x):  # a token of size 0 changes nothing
        x = x if steps * chunks == T else mx.pad(x, [(0, 0), (0, steps * chunks - T), (0, 0)])
        return x.reshape(rows, chunks, steps, 1, -1)

    decay = mx.power(2.0, chunked(delta) * A)  # [B, chunks, steps, N, inner]
    update = chunked(added) * chunked(B).swapaxes(-1, -2)
    C = chunked(C)
    h = h[:, None]
    if chunks > 1:
        ends, last = _scan(mx.prod(decay, axis=2), _end_of(decay, update), h[:, 0])
        h = mx.concatenate([h, ends[:, :-1]], axis=1)
    outputs = []
    for i in range(steps):
        h = decay[:, :, i] * h + update[:, :, i]
        outputs.append(C[:, :, i] @ h)
    y = mx.stack(outputs, axis=2).reshape(rows, steps * chunks, inner)
    return y[:, :T], h[:, -1] if chunks == 1 else last


def _expect(op, name, array, shape):
    if tuple(array.shape) != shape:
        raise ShapeError(f"{op}: {name} has shape {tuple(array.shape)}, expected {shape}")


#: The paths that the dispatch table names.
DIAGONAL = {
    "reference": _plain_diagonal(reference.diagonal_scan),
    "chunked_scan": _plain_diagonal(_scan),
    "segments": scan_kernels.diagonal,
}
SELECTIVE = {
    "reference": _plain_selective(reference.selective_scan),
    "chunked_scan": _plain_selective(_selective),
    "staged": scan_kernels.selective,
}
