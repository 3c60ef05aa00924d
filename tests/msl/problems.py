"""Inputs of the recurrence kernels with everything that breaks kernels in them, and the float64 answer."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_linattn import ops

from .harness import as64, emulated


@dataclass(frozen=True)
class Problem:
    T: int
    Hk: int = 1
    Hv: int = 1
    Dk: int = 64
    Dv: int = 32
    B: int = 1
    gate: str = "scalar"  # none, scalar, vector
    delta: bool = True
    keys: mx.Dtype = mx.float32
    values: mx.Dtype | None = None  # as keys
    hard: str = ""  # "gates": 0, 1e-30, 0.9999 and 1; "keys": one key repeated, beta 2, no decay
    lengths: tuple[int, ...] | None = None
    seed: int = 0

    def inputs(self):
        r = np.random.default_rng(self.seed)

        def normal(*shape):
            return r.standard_normal(shape).astype(np.float32)

        B, T, Hv = self.B, self.T, self.Hv
        q, k, v = normal(B, T, self.Hk, self.Dk), normal(B, T, self.Hk, self.Dk), normal(B, T, Hv, self.Dv)
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
        q /= np.linalg.norm(q, axis=-1, keepdims=True)
        decay = np.exp(-0.1 * np.exp(normal(B, T, Hv, *([self.Dk] if self.gate == "vector" else []))))
        beta = 2 / (1 + np.exp(-normal(B, T, Hv)))  # up to 2: negative eigenvalues
        if self.hard == "gates":
            for i, value in enumerate((0.0, 1e-30, 0.9999, 1.0)):
                decay[:, i::5] = value
        if self.hard == "keys":
            k[:] = k[:, :1]
            decay[:], beta[:] = 1.0, 1.99
        state = normal(B, Hv, self.Dv, self.Dk)
        q, k = (mx.array(x).astype(self.keys) for x in (q, k))
        v = mx.array(v).astype(self.values or self.keys)
        decay = None if self.gate == "none" else mx.array(decay.astype(np.float32))
        return q, k, v, decay, mx.array(beta.astype(np.float32)), mx.array(state)

    def run(self, inputs=None):
        lengths = None if self.lengths is None else mx.array(self.lengths)
        return ops.recurrence(*(inputs or self.inputs()), delta=self.delta, lengths=lengths)

    def on_emulator(self, path, order=0, seed=0, **options):
        with emulated(order, seed, path, **options):
            return self.run()

    def differences(self, got) -> tuple[float, float]:
        """Largest error of the outputs at real tokens and of the state, relative to the largest value; NaN is infinite."""
        o, state = expected(self)
        for b, n in enumerate(self.lengths or ()):
            o[b, n:] = 0.0
        pairs = ((as64(got[0]), o), (as64(got[1]), state))
        with np.errstate(invalid="ignore"):
            worst = [np.abs(a - b).max(initial=0.0) / np.abs(b).max(initial=1e-9) for a, b in pairs]
        return tuple(float("inf") if not np.isfinite(w) else float(w) for w in worst)

    @property
    def within(self) -> tuple[float, float]:
        out = self.values or self.keys
        loss = {mx.float32: 2e-6, mx.float16: 6e-4, mx.bfloat16: 5e-3}[out]
        grown = 100 if self.hard == "keys" else 1  # the recurrence itself amplifies rounding there
        return max(loss, 2e-6 * grown), 2e-6 * grown


def expected(p: Problem):
    """The recurrence in float64, token by token."""
    q, k, v, decay, beta, state = (None if x is None else as64(x) for x in p.inputs())
    repeats = p.Hv // p.Hk
    q, k = np.repeat(q, repeats, axis=2), np.repeat(k, repeats, axis=2)
    o = np.zeros(v.shape)
    for b in range(p.B):
        for t in range(p.lengths[b] if p.lengths else p.T):
            for h in range(p.Hv):
                S = state[b, h]
                if decay is not None:
                    S = S * decay[b, t, h]  # a number, or one for each column
                recalled = S @ k[b, t, h] if p.delta else 0
                S = S + np.outer(beta[b, t, h] * (v[b, t, h] - recalled), k[b, t, h])
                o[b, t, h] = S @ q[b, t, h]
                state[b, h] = S
    return o, state
