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
from .gates import fused


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

    Each rule of the table above is this one function. With S as [Dk, Dv] and one head:

    >>> import mlx.core as mx
    >>> T, D = 6, 4
    >>> q, k, v = (mx.random.normal((1, T, 1, D), key=mx.random.key(i)) for i in range(3))
    >>> k = k / mx.linalg.norm(k, axis=-1, keepdims=True)
    >>> a, b = (mx.random.uniform(shape=(1, T, 1), key=mx.random.key(i)) for i in (3, 4))
    >>> a_vector = mx.random.uniform(shape=(1, T, 1, D), key=mx.random.key(5))
    >>> def equal(rule, **options):
    ...     S = mx.zeros((D, D))
    ...     outputs = recurrence(q, k, v, **options)[0][0, :, 0]
    ...     for t in range(T):
    ...         S = rule(S, k[0, t, 0], v[0, t, 0], t)
    ...         if not mx.allclose(outputs[t], S.T @ q[0, t, 0], atol=1e-5):
    ...             return False
    ...     return True

    Additive (linear attention):    S = S + k v^T

    >>> equal(lambda S, k, v, t: S + mx.outer(k, v), delta=False)
    True

    Decayed (RetNet):    S = g S + k v^T

    >>> equal(lambda S, k, v, t: 0.9 * S + mx.outer(k, v), decay=mx.array([0.9]), delta=False)
    True

    Delta (DeltaNet):    S = S + b k (v - S^T k)^T

    >>> equal(lambda S, k, v, t: S + b[0, t] * mx.outer(k, v - S.T @ k), beta=b, delta=True)
    True

    Gated delta:    S' = a S,  S = S' + b k (v - S'^T k)^T

    >>> def gated(S, k, v, decay, write):
    ...     S = decay * S
    ...     return S + write * mx.outer(k, v - S.T @ k)
    >>> equal(lambda S, k, v, t: gated(S, k, v, a[0, t], b[0, t]), decay=a, beta=b, delta=True)
    True

    Vector-gated delta (Kimi Delta Attention):    the same with S' = diag(a) S

    >>> equal(lambda S, k, v, t: gated(S, k, v, a_vector[0, t, 0][:, None], b[0, t]), decay=a_vector, beta=b, delta=True)
    True
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
    """One token; same arguments as :func:`reference.recurrence`, but q and k keep Hk heads.

    Vectors multiply the state from the left, k^T S^T: plain BLAS is five times slower at S k.
    """
    B, _, Hv, Dv = v.shape
    Hk, Dk = k.shape[2:]
    heads, rows = (B, Hk, Hv // Hk), (B, Hk, Hv // Hk * Dv)  # a key head's value heads, and their rows of S
    decay, beta = decay.reshape(*heads, 1, -1), beta.reshape(*heads, 1, 1)
    update = v.reshape(*heads, Dv, 1)
    if delta:
        if decay.shape[-1] == 1:
            recalled = k.reshape(B, Hk, 1, Dk) @ state.reshape(*rows, Dk).swapaxes(-1, -2)
            update = _corrected(update, decay, recalled.reshape(*heads, Dv, 1))
        else:
            k_decayed = decay * k.reshape(B, Hk, 1, 1, Dk)
            update = update - (k_decayed @ state.reshape(*heads, Dv, Dk).swapaxes(-1, -2)).reshape(*heads, Dv, 1)
    state = _rewritten(state.reshape(*heads, Dv, Dk), decay, beta, update, k.reshape(B, Hk, 1, 1, Dk))
    o = q.reshape(B, Hk, 1, Dk) @ state.reshape(*rows, Dk).swapaxes(-1, -2)
    return o.reshape(B, 1, Hv, Dv), state.reshape(B, Hv, Dv, Dk)


@fused
def _corrected(v, decay, recalled):
    return v - decay * recalled


@fused
def _rewritten(state, decay, beta, update, k):
    return state * decay + (beta * update) * k


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
