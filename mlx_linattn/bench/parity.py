"""Before anything is timed: do the fast paths compute what their references compute?"""

from __future__ import annotations

from itertools import pairwise

import mlx.core as mx
import numpy as np

from ..errors import ParityError
from ..model import Model
from ..ops import use_backend
from ..parallel import Elsewhere
from ..state import KVOptions
from .sides import Progress

PIECES = (256, 44)  # long enough for the chunked kernels and for more than one tile of keys; the second fills no chunk
STEPS = 4
TOKENS = sum(PIECES) + STEPS
WITHIN = {mx.float32: 1e-2, mx.float16: 3e-2, mx.bfloat16: 5e-2}  # GPUs round even float32 products to 10 bits
PEER_WITHIN = {
    mx.float32: 1e-2,
    mx.float16: 0.15,
    mx.bfloat16: 0.15,
}  # of whole models: the roundings of all layers add up


def sample(vocab: int, count: int, seed: int = 0) -> list[int]:
    """Token ids drawn at random: what they say does not change the speed."""
    return np.random.default_rng(seed).integers(0, vocab, count).tolist()


def pieces(vocab: int) -> list[mx.array]:
    """The ids [1, T] of the check, as they are read: two pieces of a prompt, then single tokens."""
    ids, edges = sample(vocab, TOKENS), np.cumsum([0, *PIECES, *[1] * STEPS]).tolist()
    return [mx.array(ids[a:b])[None] for a, b in pairwise(edges)]


class _Compared:
    """A layer's mixer that computes both ways, each with a state of its own, and passes the reference's result on.

    So every layer is compared on the same inputs, and a rounding in one is not taken for an error of the next.
    """

    def __init__(self, mixer, state):
        self.mixer, self.state, self.ranks = mixer, state, mixer.ranks
        self.worst, self.dtype = 0.0, mx.float32

    def __call__(self, x, state, span):
        with use_backend("reference"):
            expected = self.mixer(x, state, span)
        mx.eval(expected)  # where several ranks do this, all sum the one before the other
        got = self.mixer(x, self.state, span)
        self.worst = max(self.worst, difference(got, expected))
        self.dtype = x.dtype
        mx.eval(state.state, self.state.state)
        return expected


def check(model: Model, options: KVOptions, progress: Progress = lambda done: None) -> float:
    """The largest difference of a mixer's outputs from its reference's, relative to these, prefill and single tokens.

    Raises ParityError where it is more than rounding.
    """
    here = {i: layer for i, layer in enumerate(model.layers) if not isinstance(layer, Elsewhere)}
    states = model.make_cache(options)
    compared = {i: _Compared(layer.mixer, states[i]) for i, layer in here.items()}
    state = model.make_cache(options)
    try:
        for i, one in compared.items():
            here[i].mixer = one
        for ids in pieces(model.spec.vocab_size):
            mx.eval(model.hidden_states(ids, state))
            progress(state.offset)
    finally:
        for i, one in compared.items():
            here[i].mixer = one.mixer
    for i, one in compared.items():
        if one.worst > WITHIN[one.dtype]:
            raise ParityError(
                f"layer {i} ({type(one.mixer).__name__}) differs from its reference by {one.worst:.1%} on {TOKENS} tokens, where at "
                f"most {WITHIN[one.dtype]:.0%} is rounding: nothing is measured; `mlx-linattn doctor` switches off a wrong kernel"
            )
    return max(one.worst for one in compared.values())


def check_peer(model: Model, theirs, name: str, progress: Progress = lambda done: None) -> float:
    """The largest difference of the two models' logits, relative to their spread; raises ParityError where they disagree."""
    state, cache, worst = model.make_cache(), theirs.make_cache(), 0.0
    for ids in pieces(model.spec.vocab_size):
        logits = model.logits(model.hidden_states(ids, state)[:, -1])
        worst = max(worst, difference(logits, theirs(ids, cache)[:, -1]))
        progress(state.offset)
    if worst > PEER_WITHIN[logits.dtype]:
        raise ParityError(
            f"the logits of mlx_linattn and {name} differ by {worst:.0%} of their spread on {TOKENS} tokens: "
            "they do not compute the same model, so their speeds are not compared"
        )
    return worst


def difference(got: mx.array, expected: mx.array) -> float:
    """Of the last axis' vectors together, relative to the spread of what is expected."""
    got, expected = got.astype(mx.float32), expected.astype(mx.float32)
    found = (mx.linalg.norm(got - expected) / mx.maximum(mx.linalg.norm(expected - expected.mean()), 1e-9)).item()
    return found if found == found else float("inf")
