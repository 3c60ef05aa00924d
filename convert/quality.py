"""How much a conversion changed what a model says: source and result read the same text, layer beside layer.

Both models run at once and in float32, each layer's weights are loaded when they are needed and let go of afterwards, so
that this takes two layers' memory whatever the size of the model.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from mlx_linattn import arch
from mlx_linattn.model import Model
from mlx_linattn.weights import Tensors, assemble, quantization
from mlx_linattn.weights.checkpoint import Checkpoint

from .bits import Quantization
from .plan import Plan
from .tensors import dequantize

ROW = 256  # tokens read in one go
MOST_ROWS = 16


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
    one, other = plain_model(source), plain_model(result)
    B = len(ids)
    errors: dict[str, float] = {}
    one.layers = [
        _PairOfLayers(f"{i} ({type(a.mixer).__name__})", a, b, errors)
        for i, (a, b) in enumerate(zip(one.layers, other.layers))
    ]
    other.layers = []
    hidden = _pair_up(one, other).hidden_states(ids)
    mx.eval(hidden)
    return _measure(one, other, hidden[:B], hidden[B:], ids, errors)


class Numbers(Tensors):
    """A checkpoint's tensors as plain numbers, also where MLX quantized them."""

    def __init__(self, checkpoint, family, spec):
        super().__init__(checkpoint, family, spec)
        found = quantization(checkpoint.config, family.PREFIXES) if checkpoint.is_mlx else None
        self._default, self._overrides = found or ({}, {})

    def read(self, name: str, decoded_dtype: mx.Dtype = mx.float32) -> mx.array:
        base = name.removesuffix(".weight")
        if f"{base}.scales" not in self:
            return super().read(name, decoded_dtype)
        wanted = self._overrides.get(base, {})
        q = Quantization(**{**self._default, **(wanted if isinstance(wanted, dict) else {})})
        parts = [super(Numbers, self).read(f"{base}.{part}") for part in ("weight", "scales")]
        parts += [super().read(f"{base}.biases")] if f"{base}.biases" in self else []
        return dequantize(parts, q)


def plain_model(checkpoint: Checkpoint) -> Model:
    """A model that has read none of its weights yet; in float32, but for stacks of experts, which are the bulk of a layer."""
    family = arch.family(checkpoint.config)
    model = Model(family.spec(checkpoint.config))
    tensors = Numbers(checkpoint, family, model.spec)
    names = dict(family.names(model.spec))
    loaded = [
        (name, array if array.ndim == 3 else array.astype(mx.float32))
        for name, array in assemble(model, tensors, names, mx.float32)
    ]
    checkpoint.close()
    model.update(tree_unflatten(loaded))
    return model


class _PairOfLayers:
    """A layer of the source on the first half of the rows, its twin of the result on the second."""

    def __init__(self, name: str, one: nn.Module, other: nn.Module, errors: dict[str, float]):
        self.name, self.one, self.other, self.errors = name, one, other, errors
        self.mixer = one.mixer

    def __call__(self, x, state, *rest):
        a, b = _halves(x)
        # One after the other, so that only one pass widens its experts at a time.
        y = self.one(a, state, *rest)
        mx.eval(y)
        alone = self.other(a, self.other.mixer.make_state(), *rest)
        before, right, wrong = (_stream(x) for x in (a, y, alone))
        error = mx.linalg.norm(wrong - right) / mx.linalg.norm(right - before)
        mx.eval(error)
        z = self.other(b, self.other.mixer.make_state(), *rest)
        mx.eval(z)
        self.errors[self.name] = error.item()
        self.one = self.other = self.mixer = None  # lets go of the weights
        mx.clear_cache()
        return _joined(y, z)


class _Pair:
    """Any other part of the two models, in the same way."""

    def __init__(self, one: nn.Module, other: nn.Module):
        self.one, self.other = one, other

    def __call__(self, *x):
        a, b = _halves(x)
        return _joined(self.one(*a), self.other(*b))


def _pair_up(one: Model, other: Model) -> Model:
    """A model that runs both: the source's rows, then the result's."""
    parts = {name: part for name, part in one.children().items() if isinstance(part, nn.Module) and name != "head"}

    class Both(Model):
        def __init__(self):
            nn.Module.__init__(self)
            self.spec, self.layers = one.spec, one.layers
            for name, part in parts.items():
                setattr(self, name, _Pair(part, other[name]))
            self.embed = lambda ids: _joined(one.embed(ids), other.embed(ids))

    return Both()


def _halves(x):
    return tree_map(lambda array: array[: len(array) // 2], x), tree_map(lambda array: array[len(array) // 2 :], x)


def _joined(a, b):
    return tree_map(lambda one, other: mx.concatenate([one, other]), a, b)


def _stream(x) -> mx.array:
    """The residual stream, the last of the arrays that layers hand on."""
    return tree_flatten(x)[-1][1].reshape(-1)


def _measure(one: Model, other: Model, a, b, ids, errors) -> Quality:
    divergences, agreement, losses = [], [], ([], [])
    following = mx.concatenate([ids[:, 1:], mx.full((len(ids), 1), -1)], axis=1).reshape(-1)
    a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    for start in range(0, len(a), 64):  # a few rows of logits at a time
        rows = slice(start, start + 64)
        p, q = (_log_softmax(model.logits(x[rows])) for model, x in ((one, a), (other, b)))
        divergences.append((mx.exp(p) * (p - q)).sum(-1))
        agreement.append(p.argmax(-1) == q.argmax(-1))
        real = following[rows] >= 0
        for loss, scores in zip(losses, (p, q)):
            chosen = mx.take_along_axis(scores, mx.maximum(following[rows], 0)[:, None], axis=-1)[:, 0]
            loss.append(mx.where(real, -chosen, 0))
        mx.eval(divergences[-1], agreement[-1], losses[0][-1], losses[1][-1])
    kl = mx.sort(mx.maximum(mx.concatenate(divergences), 0))
    count = (following >= 0).sum()
    perplexities = [mx.exp(mx.concatenate(loss).sum() / mx.maximum(count, 1)).item() for loss in losses]
    return Quality(
        tokens=ids.size,
        mean_kl=kl.mean().item(),
        kl_95=kl[int(0.95 * (len(kl) - 1))].item(),
        max_kl=kl[-1].item(),
        top_1_agreement=mx.concatenate(agreement).astype(mx.float32).mean().item(),
        source_perplexity=perplexities[0],
        perplexity=perplexities[1],
        layer_errors=errors,
    )


def _log_softmax(logits):
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def rows_of(tokens: list[int]) -> mx.array:
    """[B, T] without padding: a last piece that is too short is left out."""
    width = min(ROW, len(tokens))
    count = min(len(tokens) // width, MOST_ROWS)
    return mx.array(tokens[: count * width]).reshape(count, width)


def memory_needed(plan: Plan) -> int:
    """Bytes that :func:`compare` holds at most, about: a layer of both models, and one stack of experts widened."""
    layers: Counter[str] = Counter()
    for entry in plan.entries:
        layer = re.search(r"layers\.\d+\.", entry.target)
        layers[layer.group() if layer else "outside"] += 2 * entry.parameters * (2 if len(entry.shape) == 3 else 4)
    widened = max((4 * entry.parameters for entry in plan.entries if len(entry.shape) == 3), default=0)
    return max(n for name, n in layers.items() if name != "outside") + layers["outside"] + widened
