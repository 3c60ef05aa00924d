"""The matrix-state recurrence: chunked, step and reference forms against NumPy float64, over shapes, gates and splits."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from helpers import assert_close
from hypothesis import given
from hypothesis import strategies as st

from mlx_linattn import ops
from mlx_linattn.errors import ShapeError
from mlx_linattn.ops import chunked

BACKENDS = ("reference", "mlx")
TOKENS = st.sampled_from([1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 47])
ROWS = st.integers(1, 2)
HARD_DECAYS = (0.0, 1e-30, 1e-4, 0.5, 0.9999, 1.0)


@dataclass(frozen=True)
class Case:
    """Arguments of ``ops.recurrence`` in NumPy."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    decay: np.ndarray | None
    beta: np.ndarray | None
    state: np.ndarray | None
    delta: bool

    def run(self, backend="mlx", first=0, last=None, state="own", lengths=None, dtype=mx.float32):
        """``ops.recurrence`` on the tokens from ``first`` to ``last``."""

        def cut(x, dtype=mx.float32):
            if x is None:
                return None
            return mx.array(x if x.ndim == 1 else x[:, first:last], dtype=dtype)

        start = self.state if isinstance(state, str) else state
        lengths = None if lengths is None else mx.array(lengths)
        with ops.use_backend(backend):
            return ops.recurrence(
                cut(self.q, dtype), cut(self.k, dtype), cut(self.v, dtype), cut(self.decay), cut(self.beta),
                None if start is None else mx.array(start), delta=self.delta, lengths=lengths,
            )  # fmt: skip

    def row(self, b, length):
        """Row ``b`` alone, cut to its length."""
        parts = [
            x if x is None or x.ndim == 1 else x[b : b + 1, :length]
            for x in (self.q, self.k, self.v, self.decay, self.beta)
        ]
        return Case(*parts, None if self.state is None else self.state[b : b + 1], self.delta)


def exact(case: Case):
    """The formula of ops/recurrence.py in float64."""
    q, k, v = (x.astype(np.float64) for x in (case.q, case.k, case.v))
    B, T, Hv, Dv = v.shape
    Dk, repeats = k.shape[-1], Hv // k.shape[2]
    q, k = np.repeat(q, repeats, axis=2), np.repeat(k, repeats, axis=2)
    decay = np.ones(Hv) if case.decay is None else case.decay.astype(np.float64)
    decay = np.broadcast_to(decay[..., None] if decay.ndim != 4 else decay, (B, T, Hv, Dk))
    beta = np.ones((B, T, Hv)) if case.beta is None else case.beta.astype(np.float64)
    S = np.zeros((B, Hv, Dv, Dk)) if case.state is None else case.state.astype(np.float64)
    out = np.zeros((B, T, Hv, Dv))
    for t in range(T):
        S = S * decay[:, t, :, None, :]
        recalled = np.einsum("bhvk,bhk->bhv", S, k[:, t]) if case.delta else 0.0
        S = S + np.einsum("bhv,bhk->bhvk", beta[:, t, :, None] * (v[:, t] - recalled), k[:, t])
        out[:, t] = np.einsum("bhvk,bhk->bhv", S, q[:, t])
    return out, S


@st.composite
def cases(draw, tokens=TOKENS, rows=ROWS):
    B, T = draw(rows), draw(tokens)
    Hk, repeats = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    Dk, Dv = draw(st.sampled_from([1, 3, 8, 20])), draw(st.sampled_from([1, 5, 16]))
    Hv, rng = Hk * repeats, np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    delta = draw(st.booleans())
    q, v = rng.normal(size=(B, T, Hk, Dk)), rng.normal(size=(B, T, Hv, Dv))
    k = rng.normal(size=(B, T, Hk, Dk))
    if draw(st.booleans()):  # all keys of a head nearly alike
        k = k[:, :1] + draw(st.sampled_from([0.0, 1e-3])) * k
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    shape = {"none": None, "head": (Hv,), "scalar": (B, T, Hv), "vector": (B, T, Hv, Dk)}[
        draw(st.sampled_from(["none", "head", "scalar", "vector"]))
    ]
    decay = None
    if shape is not None:
        hard = draw(st.lists(st.sampled_from(HARD_DECAYS), min_size=1, max_size=3))
        decay = np.where(rng.random(shape) < 0.5, rng.choice(hard, size=shape), rng.uniform(0.7, 1.0, size=shape))
    beta = 2 * rng.random((B, T, Hv)) if draw(st.booleans()) else None
    if beta is not None and draw(st.booleans()):
        beta = np.where(rng.random(beta.shape) < 0.3, 2.0, beta)
    state = rng.normal(size=(B, Hv, Dv, Dk)) if draw(st.booleans()) else None
    arrays = (x if x is None else x.astype(np.float32) for x in (q, k, v, decay, beta, state))
    return Case(*arrays, delta)


def assert_same(got, want, within=2e-5):
    for name, one, other in zip(("outputs", "state"), got, want):
        other = np.array(other, np.float64)
        assert_close(one, other, within * max(1.0, np.abs(other).max(initial=0.0)), name)


@pytest.mark.parametrize("backend", BACKENDS)
@given(case=cases())
def test_equals_the_formula_in_float64(backend, case):
    assert_same(case.run(backend), exact(case))


@given(case=cases(tokens=st.integers(2, 40)), data=st.data())
def test_split_anywhere_equals_whole(case, data):
    T = case.v.shape[1]
    cut = data.draw(st.integers(1, T - 1), label="cut")
    left, state = case.run(last=cut)
    right, state = case.run(first=cut, state=state)
    assert_same((mx.concatenate([left, right], axis=1), state), exact(case))


@given(case=cases(tokens=st.integers(17, 70)))
def test_long_prompts_go_segment_by_segment(case):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "SEGMENT", 32)
        assert_same(case.run("mlx"), exact(case))


@given(case=cases(tokens=st.integers(1, 20), rows=st.just(1)))
def test_token_by_token_equals_whole(case):
    state, outputs = "own", []
    for t in range(case.v.shape[1]):
        o, state = case.run(first=t, last=t + 1, state=state)
        outputs.append(o)
    assert_same((mx.concatenate(outputs, axis=1), state), exact(case))


@pytest.mark.parametrize("backend", BACKENDS)
@given(case=cases(rows=st.just(2)), data=st.data())
def test_a_padded_row_is_the_row_alone(backend, case, data):
    T = case.v.shape[1]
    lengths = [data.draw(st.integers(0, T), label="length") for _ in range(2)]
    for b, length in enumerate(lengths):  # what lies in the padding does not matter
        for x in (case.q, case.k, case.v):
            x[b, length:] *= 100.0
    outputs, state = case.run(backend, lengths=lengths)
    for b, length in enumerate(lengths):
        alone = case.row(b, length)
        want = exact(alone) if length else (np.zeros((1, 0, *case.v.shape[2:])), alone.state)
        if want[1] is None:
            want = want[0], np.zeros((1, *state.shape[1:]))
        assert_same((outputs[b : b + 1, :length], state[b : b + 1]), want)


@given(case=cases())
def test_bfloat16_inputs_keep_a_float32_state(case):
    outputs, state = case.run(dtype=mx.bfloat16)
    assert outputs.dtype == mx.bfloat16 and state.dtype == mx.float32
    q, k, v = (np.array(mx.array(x).astype(mx.bfloat16).astype(mx.float32)) for x in (case.q, case.k, case.v))
    want = exact(Case(q, k, v, case.decay, case.beta, case.state, case.delta))
    assert_same((outputs.astype(mx.float32), state), (want[0], want[1]), within=1e-2)
    assert_close(state, want[1], 5e-5 * max(1.0, np.abs(want[1]).max()), "state")


def test_repeated_keys_at_the_largest_beta_stay_finite_and_exact():
    """beta = 2 and one key reflect the state at every token: the hardest triangular system."""
    rng = np.random.default_rng(0)
    T, D = 256, 16
    k = np.broadcast_to(rng.normal(size=(1, 1, 1, D)), (1, T, 1, D)).astype(np.float32)
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    q, v = (rng.normal(size=(1, T, 1, D)).astype(np.float32) for _ in range(2))
    case = Case(q, k, v, None, np.full((1, T, 1), 2.0, np.float32), None, True)
    assert_same(case.run(), exact(case))


def test_a_decay_of_zero_forgets_everything_before():
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=(1, 20, 2, 4)).astype(np.float32) for _ in range(3))
    decay = np.full((1, 20, 2, 4), 0.9, np.float32)
    decay[:, 10] = 0.0
    case = Case(q, k, v, decay, None, None, False)
    outputs, state = case.run()
    alone, last = case.run(first=10)
    assert_same((outputs[:, 10:], state), (alone, last), within=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        {"q": (1, 4, 2, 9)},
        {"k": (1, 5, 2, 8)},
        {"v": (1, 4, 3, 8)},
        {"decay": (3,)},
        {"decay": (1, 4, 3)},
        {"decay": (1, 4, 4, 7)},
        {"beta": (1, 4, 2)},
        {"state": (1, 4, 8, 7)},
    ],
)
def test_shapes_that_do_not_fit_are_named(change):
    shapes = {"q": (1, 4, 2, 8), "k": (1, 4, 2, 8), "v": (1, 4, 4, 6)} | change
    with pytest.raises(ShapeError, match="recurrence: "):
        ops.recurrence(**{name: mx.zeros(shape) for name, shape in shapes.items()}, delta=True)
