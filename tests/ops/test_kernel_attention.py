"""Kernel linear attention against its quadratic formula in NumPy float64, for every feature map, and over 100,000 tokens."""

import mlx.core as mx
import numpy as np
import pytest
from helpers import assert_close
from hypothesis import given
from hypothesis import strategies as st

from mlx_linattn import ops
from mlx_linattn.errors import RequestError, ShapeError

MAPS = ("elu", "relu", "silu", "exp", "identity")
TOKENS = st.sampled_from([1, 2, 5, 8, 17, 33])
SIGNED = ("silu", "identity")  # their denominators can be near 0: tests feed them positive numbers


def log_features(x, name):
    """log phi(x), elementwise, in float64."""
    x = x.astype(np.float64)
    if name == "elu":
        return np.where(x > 0, np.log1p(np.maximum(x, 0)), x)
    if name == "exp":
        return x * x.shape[-1] ** -0.5
    with np.errstate(divide="ignore"):
        return np.log(np.maximum(x, 0) if name in ("relu", "identity") else x / (1 + np.exp(-x)))


def exact(q, k, v, name):
    """Every query against every key, as softmax attention would, with its weights summed in the log domain."""
    repeats = v.shape[2] // k.shape[2]
    q, k = (np.repeat(log_features(x, name), repeats, axis=2) for x in (q, k))
    scores = np.logaddexp.reduce(q[:, :, None] + k[:, None], axis=-1)  # [B, T, S, H]
    T = q.shape[1]
    scores = np.where(np.tril(np.ones((T, T), bool))[None, :, :, None], scores, -np.inf)
    best = scores.max(2, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(best), best, 0))
    total = weights.sum(2, keepdims=True)
    return np.einsum("btsh,bshd->bthd", weights / np.where(total == 0, 1, total), v.astype(np.float64))


@st.composite
def cases(draw, tokens=TOKENS):
    B, T, Hk, repeats = draw(st.integers(1, 2)), draw(tokens), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    Dk, Dv, name = draw(st.sampled_from([1, 4, 9])), draw(st.sampled_from([1, 6])), draw(st.sampled_from(MAPS))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    spread = draw(st.sampled_from([1.0, 300.0] if name == "exp" else [1.0, 10.0]))
    q, k = (spread * rng.normal(size=(B, T, Hk, Dk)) for _ in range(2))
    if name in SIGNED:
        q, k = np.abs(q), np.abs(k)
    v = rng.normal(size=(B, T, Hk * repeats, Dv))
    return *(x.astype(np.float32) for x in (q, k, v)), name


def run(q, k, v, name, state=None, lengths=None, backend="mlx"):
    lengths = None if lengths is None else mx.array(lengths)
    with ops.use_backend(backend):
        return ops.kernel_attention(*map(mx.array, (q, k, v)), state, feature_map=name, lengths=lengths)


@pytest.mark.parametrize("backend", ["reference", "mlx"])
@given(case=cases())
def test_parallel_form_equals_the_formula_in_float64(backend, case):
    assert_close(run(*case, backend=backend)[0], exact(*case), 1e-4)


@given(case=cases())
def test_recurrent_form_equals_the_parallel_form(case):
    q, k, v, name = case
    state, steps = None, []
    for t in range(q.shape[1]):
        o, state = run(*(x[:, t : t + 1] for x in (q, k, v)), name, state)
        steps.append(o)
    assert_close(mx.concatenate(steps, axis=1), exact(*case), 1e-4)


@given(case=cases(tokens=st.integers(2, 30)), data=st.data())
def test_split_and_padded_equal_whole(case, data):
    q, k, v, name = case
    T = q.shape[1]
    cuts = [data.draw(st.integers(0, T - 1), label="length") for _ in q]
    padded = [x.copy() for x in (q, k, v)]
    for b, cut in enumerate(cuts):
        for x in padded[:2]:
            x[b, cut:] = 1e3  # must never become a peak
    left, state = run(*padded, name, lengths=cuts)
    rest = [np.stack([np.roll(x[b], -cut, axis=0) for b, cut in enumerate(cuts)]) for x in (q, k, v)]
    right, state = run(*rest, name, state, lengths=[T - cut for cut in cuts])
    want = exact(*case)
    for b, cut in enumerate(cuts):
        assert_close(left[b, :cut], want[b, :cut], 1e-4, "before the cut")
        assert_close(right[b, : T - cut], want[b, cut:], 1e-4, "after the cut")


@pytest.mark.parametrize("name", ["elu", "relu", "exp"])
@pytest.mark.parametrize("step", [1, 1000])
def test_a_hundred_thousand_tokens_stay_exact(name, step):
    """Sums of 10^5 numbers of one sign: the outputs are those of float64, token by token and in pieces."""
    T, D, tail = 100_000, 4, 50
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, T, 1, D)).astype(np.float32) for _ in range(3))
    if step == 1:  # the state of all but the last tokens comes in pieces, then they come one by one
        _, state = run(*(x[:, :-tail] for x in (q, k, v)), name)
        first, stride = T - tail, 1
    else:
        state, first, stride = None, 0, step
    for t in range(first, T, stride):
        o, state = run(*(x[:, t : t + stride] for x in (q, k, v)), name, state)
        mx.eval(o, state)
    phi_q, phi_k = (np.exp(log_features(x, name)) for x in (q, k))
    Z, S = phi_k[0, :, 0].sum(0), phi_k[0, :, 0].T @ v[0, :, 0].astype(np.float64)
    want = phi_q[0, -1, 0] @ S / (phi_q[0, -1, 0] @ Z)
    assert_close(o[0, -1, 0], want, 1e-6)
    if name != "exp":
        assert_close(state[0][0, 0, -1] / Z, np.ones(D), 2e-5, "Z")


def test_exponentials_far_beyond_float32_do_not_overflow():
    """Log features of 1,000 are exp(1000): the peak keeps them, and a later small key adds nothing, as it should."""
    q = np.full((1, 3, 1, 1), 5.0, np.float32)
    k = np.array([-1000.0, 1000.0, 0.0], np.float32).reshape(1, 3, 1, 1)
    v = np.array([1.0, 2.0, 3.0], np.float32).reshape(1, 3, 1, 1)
    o, (matrix, peak) = run(q, k, v, "exp")
    assert_close(o.reshape(-1), [1.0, 2.0, 2.0], 1e-6)
    assert peak.item() == 1000.0 and mx.isfinite(matrix).all().item()


def test_tiny_features_do_not_underflow():
    q = k = np.full((1, 4, 1, 2), -60.0, np.float32)  # phi = exp(-60), a product of two is below float32's range
    v = np.arange(4, dtype=np.float32).reshape(1, 4, 1, 1)
    assert_close(run(q, k, v, "elu")[0].reshape(-1), [0.0, 0.5, 1.0, 1.5], 1e-5)


def test_no_visible_feature_gives_zero_and_not_nan():
    q, k, v = -np.ones((1, 3, 1, 2), np.float32), np.ones((1, 3, 1, 2), np.float32), np.ones((1, 3, 1, 2), np.float32)
    assert_close(run(q, k, v, "relu")[0], np.zeros((1, 3, 1, 2)), 0.0)


def test_the_state_is_float32_and_the_output_has_the_values_dtype():
    q, k, v = (mx.ones((1, 3, 1, 4), dtype=mx.bfloat16) for _ in range(3))
    o, state = ops.kernel_attention(q, k, v, feature_map="exp")
    assert o.dtype == mx.bfloat16 and all(part.dtype == mx.float32 for part in state)


def test_what_does_not_fit_is_named():
    with pytest.raises(RequestError, match="feature map 'softmax'"):
        ops.kernel_attention(*(mx.ones((1, 2, 1, 4)) for _ in range(3)), feature_map="softmax")
    with pytest.raises(ShapeError, match="kernel_attention: "):
        ops.kernel_attention(mx.ones((1, 2, 1, 4)), mx.ones((1, 2, 1, 3)), mx.ones((1, 2, 1, 4)))
