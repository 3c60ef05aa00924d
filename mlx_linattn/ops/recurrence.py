"""The matrix-state recurrence behind every linear-attention layer.

Per head, S is Dk x Dv and always float32:

    S_t = a_t * S_{t-1} + k_t (x) b_t (v_t - d (a_t * S_{t-1})^T k_t)          o_t = S_t^T q_t

    d = 0, a = 1                 kernel linear attention (Katharopoulos et al. 2020)
    d = 0, a constant per head   RetNet, Lightning attention
    d = 0, a scalar per token    Mamba-2, simple GLA        d = 0, a vector over Dk   GLA, HGRN2
    d = 1, a = 1                 DeltaNet
    d = 1, a scalar per token    Gated DeltaNet (Yang et al. 2024)
    d = 1, a vector over Dk      Kimi Delta Attention (Kimi Team 2025)
"""

from __future__ import annotations

import mlx.core as mx

from ..errors import ShapeError
from . import chunked, dispatch, kernels, reference


def recurrence(q, k, v, decay=None, beta=None, state=None, *, delta: bool, lengths=None):
    """Run the recurrence over T tokens from ``state``.

    Args:
        q, k: [B, T, Hk, Dk]; value head h uses key head h // (Hv / Hk). Already normalised and scaled.
        v: [B, T, Hv, Dv].
        decay: linear decay in [0, 1]: None (1), [Hv] (constant), [B, T, Hv] or [B, T, Hv, Dk].
        beta: write strength, None (1) or [B, T, Hv].
        state: [B, Hv, Dv, Dk] float32 (S transposed: a row per value channel), None for zeros.
        delta: subtract what the state already answers to k (d = 1).
        lengths: [B] integers; tokens at and after a row's length change nothing, and their outputs mean nothing.

    Returns:
        o [B, T, Hv, Dv] in v's dtype, and the new state [B, Hv, Dv, Dk] in float32.

    Raises:
        ShapeError: shapes that do not fit together.
    """
    B, T, Hv, Dv = v.shape
    Hk, Dk = k.shape[2:]
    _expect("q", q, (B, T, Hk, Dk))
    _expect("k", k, (B, T, Hk, Dk))
    if Hv % Hk:
        raise ShapeError(f"recurrence: {Hv} value heads cannot share {Hk} key heads evenly")
    gate = "none" if decay is None else "vector" if decay.ndim == 4 else "scalar"
    if decay is None:
        decay = mx.ones((B, T, Hv))
    if decay.ndim == 1:
        _expect("decay", decay, (Hv,))
        decay = mx.broadcast_to(decay, (B, T, Hv))
    _expect("decay", decay, (B, T, Hv) if decay.ndim == 3 else (B, T, Hv, Dk))
    beta = mx.ones((B, T, Hv)) if beta is None else beta
    _expect("beta", beta, (B, T, Hv))
    state = mx.zeros((B, Hv, Dv, Dk)) if state is None else state
    _expect("state", state, (B, Hv, Dv, Dk))
    # Gates, write strengths and the state are float32 whatever q's dtype: in bfloat16 a decay of 0.999 never decays.
    decay, beta, state = (x.astype(mx.float32) for x in (decay, beta, state))
    call = dispatch.Call("recurrence", T, B * Hv, Dk, Dv, gate, delta, k.dtype)
    row = dispatch.choose(call)
    return PATHS[row.path](q.astype(k.dtype), k, v, decay, beta, state, delta, lengths, **row.options)


def _plain(run):
    """A path in plain MLX: float32 throughout, and padded tokens as decay 1 and beta 0."""

    def path(q, k, v, decay, beta, state, delta, lengths, **options):
        decay = decay[..., None] if decay.ndim == 3 else decay
        if lengths is not None:
            real = (mx.arange(v.shape[1]) < lengths[:, None])[..., None]  # [B, T, 1]
            decay, beta = mx.where(real[..., None], decay, 1.0), mx.where(real, beta, 0.0)
        q, k, v32 = (x.astype(mx.float32) for x in (q, k, v))
        o, state = run(q, k, v32, decay, beta, state, delta, **options)
        return o.astype(v.dtype), state

    return path


def _reference(q, k, v, decay, beta, state, delta):
    repeats = v.shape[2] // k.shape[2]
    if repeats > 1:
        q, k = mx.repeat(q, repeats, axis=2), mx.repeat(k, repeats, axis=2)
    return reference.recurrence(q, k, v, decay, beta, state, delta)


def _step(q, k, v, decay, beta, state, delta):
    """One token, as matrix-vector products; same arguments as :func:`reference.recurrence`, but q and k keep Hk heads."""
    B, _, Hv, Dv = v.shape
    Hk, Dk = k.shape[2:]
    state = state * decay[:, 0, :, None, :]
    grouped = (B, Hk, (Hv // Hk) * Dv, Dk)  # the value heads of one key head, row under row
    k, q = k[:, 0, :, None], q[:, 0, :, None]  # rows times matrices: a matrix times one column is slow on a CPU
    update = v[:, 0]
    if delta:
        update = update - (k @ state.reshape(grouped).swapaxes(-1, -2)).reshape(B, Hv, Dv)
    update = (beta[:, 0, :, None] * update).reshape(B, Hk, -1, 1)
    state = state.reshape(grouped) + update * k
    o = (q @ state.swapaxes(-1, -2)).reshape(B, 1, Hv, Dv)
    return o, state.reshape(B, Hv, Dv, Dk)


def _expect(name, array, shape):
    if tuple(array.shape) != shape:
        raise ShapeError(f"recurrence: {name} has shape {tuple(array.shape)}, expected {shape}")


#: The paths that the dispatch table names; a kernel takes q, k and v in their own dtypes.
PATHS = {
    "reference": _plain(_reference),
    "step": _plain(_step),
    "chunked": _plain(chunked.recurrence),
    "packed": kernels.packed,
    "simdgroup": kernels.simdgroup,
    "tensor_core": kernels.tensor_core,
}
