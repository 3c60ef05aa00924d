"""How much a conversion changed what a model says: source and result read the same text, layer beside layer.

Both compute in float32. Of either model one layer's weights are in memory at a time, of a layer's experts one, and of
embedding and head some rows: that takes little memory whatever the size of the model.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from mlx_linattn import arch
from mlx_linattn.model import Model
from mlx_linattn.spec import MoeSpec
from mlx_linattn.state import ModelState, RecurrentState
from mlx_linattn.weights.checkpoint import Checkpoint

from .plan import Plan
from .reader import Reader

ROW = 256  # tokens read in one go
MOST_ROWS = 16
PAGE = 1024  # tokens of the bundled text, about
OVERHEAD = 300 << 20  # bytes of the program itself, and of slices of the vocabulary


@dataclass(frozen=True)
class Quality:
    """Of the result against the source, over ``tokens`` positions. KL divergences in nats, of source from result."""

    tokens: int
    mean_kl: float
    kl_95: float  # 95 % of the positions lie below
    max_kl: float
    top_1_agreement: float
    source_perplexity: float
    perplexity: float
    layer_errors: dict[str, float]  # of a layer alone, given the source's input, relative to what the layer adds


def compare(source: Checkpoint, result: Checkpoint, ids: mx.array) -> Quality:
    """Both models on ``ids`` [B, T]; neither is loaded as a whole."""
    one, other = Reader(source), Reader(result)
    errors: dict[str, float] = {}
    hidden = _Both(one, other, errors).hidden_states(ids)
    mx.eval(hidden)
    return _measure(one, other, *_halves(hidden), ids, errors)


class _Both(Model):
    """Runs two models at once: the first half of the rows is the source's, the second the result's."""

    def __init__(self, one: Reader, other: Reader, errors: dict[str, float]):
        nn.Module.__init__(self)
        self.spec = one.spec
        self.embed = lambda ids: _joined(one.embed(ids), other.embed(ids))
        self.layers = [_PairOfLayers(i, one, other, errors) for i in range(len(self.spec.layers))]
        for name, part in one.model.children().items():
            if isinstance(part, nn.Module) and name not in ("embed", "head"):
                setattr(self, name, _Pair(one.fill(part, name), other.fill(other.model[name], name)))

    def make_cache(self):
        return ModelState(RecurrentState(0) for _ in self.layers)  # a layer makes its own state


class _PairOfLayers:
    def __init__(self, i: int, one: Reader, other: Reader, errors: dict[str, float]):
        self.i, self.one, self.other, self.errors = i, one, other, errors

    def __call__(self, x, *rest):
        name = f"{self.i} ({type(self.one.model.layers[self.i].mixer).__name__})"
        before, _ = _halves(x)
        right = self.one.layer(self.i)(before, *rest)
        mx.eval(right)
        mx.clear_cache()
        # The result's layer reads the source's input as well: what is wrong then is wrong in this layer alone.
        both = self.other.layer(self.i)(x, *rest)
        mx.eval(both)
        mx.clear_cache()
        alone, wrong = _halves(both)
        error = mx.linalg.norm(_stream(alone) - _stream(right)) / mx.linalg.norm(_stream(right) - _stream(before))
        self.errors[name] = error.item()
        return _joined(right, wrong)


class _Pair:
    """Any other part of the two models."""

    def __init__(self, one: nn.Module, other: nn.Module):
        self.one, self.other = one, other

    def __call__(self, *x):
        a, b = _halves(x)
        return _joined(self.one(*a), self.other(*b))


def _halves(x):
    return tree_map(lambda array: array[: len(array) // 2], x), tree_map(lambda array: array[len(array) // 2 :], x)


def _joined(a, b):
    return tree_map(lambda one, other: mx.concatenate([one, other]), a, b)


def _stream(x) -> mx.array:
    """The residual stream, the last of the arrays that layers hand on."""
    return tree_flatten(x)[-1][1].reshape(-1)


def _measure(one: Reader, other: Reader, a, b, ids, errors) -> Quality:
    """From the last hidden states [B, T, H] of both. The vocabulary comes in slices, and sums over it run on."""
    following = mx.concatenate([ids[:, 1:], mx.full((len(ids), 1), -1)], axis=1).reshape(-1)
    a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    p, q = _Scores(len(a)), _Scores(len(a))
    difference = mx.zeros(len(a))  # sum of exp(logit of p - p.best) (logit of p - logit of q)
    for tokens in min(one.slices(one.head), other.slices(other.head), key=len):
        x, y = one.logits(a, tokens), other.logits(b, tokens)
        weights, shrunk = p.add(x, tokens, following)
        q.add(y, tokens, following)
        difference = difference * shrunk + (weights * (x - y)).sum(-1)
        mx.eval(difference, *p.arrays, *q.arrays)
        mx.clear_cache()
    kl = mx.sort(mx.maximum(difference / p.total - p.log_total + q.log_total, 0))
    real = following >= 0
    count = mx.maximum(real.sum(), 1)
    perplexities = [mx.exp(mx.where(real, s.log_total - s.chosen, 0).sum() / count).item() for s in (p, q)]
    return Quality(
        tokens=ids.size,
        mean_kl=kl.mean().item(),
        kl_95=kl[int(0.95 * (len(kl) - 1))].item(),
        max_kl=kl[-1].item(),
        top_1_agreement=(p.token == q.token).astype(mx.float32).mean().item(),
        source_perplexity=perplexities[0],
        perplexity=perplexities[1],
        layer_errors=errors,
    )


class _Scores:
    """Of one model's logits at N positions: the best, its token, the sum of exp(logit - best), and the logit of the text."""

    def __init__(self, N: int):
        self.best, self.total, self.chosen = mx.full(N, -mx.inf), mx.zeros(N), mx.zeros(N)
        self.token = mx.zeros(N, mx.uint32)

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return self.best, self.total, self.chosen, self.token

    @property
    def log_total(self) -> mx.array:
        return self.best + mx.log(self.total)

    def add(self, logits: mx.array, tokens: slice, following: mx.array) -> tuple[mx.array, mx.array]:
        """Takes in logits [N, n] of a slice of the vocabulary; returns exp(logits - best) and by what earlier ones shrank."""
        best = mx.maximum(self.best, logits.max(-1))
        self.token = mx.where(logits.max(-1) > self.best, logits.argmax(-1) + tokens.start, self.token)
        shrunk, weights = mx.exp(self.best - best), mx.exp(logits - best[:, None])
        self.best, self.total = best, self.total * shrunk + weights.sum(-1)
        here = (following >= tokens.start) & (following < tokens.stop)
        place = mx.where(here, following - tokens.start, 0)[:, None]
        self.chosen = mx.where(here, mx.take_along_axis(logits, place, axis=-1)[:, 0], self.chosen)
        return weights, shrunk


def rows_of(tokens: list[int]) -> mx.array:
    """[B, T] without padding: a last piece that is too short is left out."""
    width = min(ROW, len(tokens))
    count = min(len(tokens) // width, MOST_ROWS)
    return mx.array(tokens[: count * width]).reshape(count, width)


def memory_needed(plan: Plan, tokens: int = PAGE) -> int:
    """Bytes that :func:`compare` holds at most, about, all in float32.

    Weights: a layer without its experts, its largest tensor once more while that is decoded, and one expert.
    Tokens of both models: what goes through the layers, what experts make of it, and what is inside a layer for one row.
    """
    spec = arch.family(plan.config).spec(plan.config)
    layers: Counter[str] = Counter()
    largest = expert = 0
    for entry in plan.entries:
        layer = re.search(r"layers\.\d+\.", entry.target)
        if layer is None:
            continue
        if "switch_mlp" in entry.target:
            expert = max(expert, 3 * entry.parameters // entry.shape[0])
        else:
            layers[layer.group()] += entry.parameters
            largest = max(largest, entry.parameters)
    streams = 6 + sum(layer.mixer_residual.starts_block + layer.mlp_residual.starts_block for layer in spec.layers)
    copies = max(2 * layer.mlp.top_k if isinstance(layer.mlp, MoeSpec) else 0 for layer in spec.layers)
    widths = max(layers.values(), default=0) // spec.hidden_size  # of all that a layer's matrices make, more or less
    inside = 2 * tokens * spec.hidden_size * (streams + copies) + 3 * min(tokens, ROW) * widths
    return 4 * (max(layers.values(), default=0) + largest + expert + inside) + OVERHEAD
