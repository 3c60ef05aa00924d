"""A model from its spec: embedding, layers, norm, head. Called as mlx_lm's models are: ``model(ids, cache) -> logits``."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .errors import RequestError
from .layers import ALONE, Layer, ResidualMix, RMSNorm
from .spec import ModelSpec
from .state import KVOptions, ModelState


class Model(nn.Module):
    """An MLX module that reads token ids and gives logits; made from a :class:`ModelSpec`, with random weights."""

    ranks = ALONE  # to which embedding and head are dealt out, where spec.vocab_parts says so

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.spec = spec
        rows = spec.vocab_size // spec.vocab_parts
        self.embed = nn.Embedding(rows, spec.hidden_size)
        self.layers = [Layer(layer, spec.hidden_size, spec.norm_eps) for layer in spec.layers]
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        if spec.mixed_residual:
            self.output_mix = ResidualMix(spec.hidden_size, spec.norm_eps)
        if not spec.tied:
            self.head = nn.Linear(spec.hidden_size, rows, bias=False)

    @property
    def model_type(self) -> str:
        """As in config.json."""
        return self.spec.model_type

    def make_cache(self, options: KVOptions = KVOptions()) -> ModelState:  # noqa: B008 - frozen
        """A fresh state: what this model remembers of zero tokens; ``options`` say how attention layers keep theirs."""
        return ModelState((layer.mixer.make_state() for layer in self.layers), options)

    def rehearse(self, state: ModelState) -> ModelState:
        """What ``state`` would be after one more token, for its shapes: it is not evaluated, and nothing else changes."""
        twin = state.fork()
        self.hidden_states(mx.array([[0]]), twin)
        return twin

    def sampled(self, count: int) -> list[tuple[str, mx.Dtype, tuple[int, ...], mx.array]]:
        """Of every weight its name, dtype and shape, and ``count`` of its numbers, evenly spread (float32 or int64)."""
        found = []
        for name, array in sorted(tree_flatten(self.parameters())):
            sample = array.reshape(-1)[:: max(1, array.size // count)][:count]
            wide = mx.float32 if mx.issubdtype(array.dtype, mx.floating) else mx.int64
            found.append((name, array.dtype, array.shape, sample.astype(wide)))
        return found

    def __call__(
        self,
        ids,
        cache: ModelState | None = None,
        *,
        lengths: Sequence[int] | None = None,
        left_padding: Sequence[int] | None = None,
    ):
        """Logits [B, T, V] of ``ids`` [B, T], read after what ``cache`` holds; the cache is brought up to date in place.

        Args:
            lengths: real tokens of each row, for rows padded on the right.
            left_padding: padding tokens before each row, for rows padded on the left.
                A padded token changes no state; its logits mean nothing.
        """
        ids = mx.array(ids)
        if left_padding is None:
            return self.logits(self.hidden_states(ids, cache, lengths=lengths))
        if lengths is not None:
            raise RequestError("give lengths (padding on the right) or left_padding, not both")
        T = ids.shape[1]
        columns = mx.arange(T)
        shift = mx.array(list(left_padding))[:, None]
        # Layers know padding on the right only: turn each row, and turn its logits back.
        ids = mx.take_along_axis(ids, (columns + shift) % T, axis=1)
        logits = self.logits(self.hidden_states(ids, cache, lengths=[T - n for n in left_padding]))
        return mx.take_along_axis(logits, ((columns - shift) % T)[..., None], axis=1)

    def hidden_states(self, ids, cache: ModelState | None = None, *, lengths: Sequence[int] | None = None):
        """The last hidden states [B, T, H], after the final norm, of ``ids`` [B, T]."""
        if 0 in ids.shape:
            raise RequestError(f"ids have shape {list(ids.shape)}: give at least one row of at least one token")
        state = self.make_cache() if cache is None else cache
        span = state.span(*ids.shape, lengths)
        x = self._embedded(ids)
        if self.spec.embedding_scale != 1.0:
            x = x * self.spec.embedding_scale
        dtype = x.dtype
        if self.spec.residual_float32:
            x = x.astype(mx.float32)
        if self.spec.mixed_residual:
            x = ((), x)
        with state.advancing(span):
            for layer, layer_state in zip(self.layers, state):
                x = layer(x, layer_state, span, dtype)
        if self.spec.mixed_residual:
            x = self.output_mix(*x)
        return self.norm(x).astype(dtype)

    def _embedded(self, ids):
        if self.spec.vocab_parts == 1:
            return self.embed(ids)
        first, end = self.ranks.deal.range(self.spec.vocab_size)
        here = (ids >= first) & (ids < end)
        rows = self.embed(mx.where(here, ids - first, 0))
        return self.ranks.sum(mx.where(here[..., None], rows, 0))

    def logits(self, hidden):
        """Logits [..., V] of hidden states [..., H]. Ask for the rows you need: a whole prompt's logits are large."""
        logits = self.embed.as_linear(hidden) if self.spec.tied else self.head(hidden)
        if self.spec.vocab_parts > 1:
            logits = self.ranks.gather(logits)
        cap = self.spec.logit_softcap
        return logits if cap is None else cap * mx.tanh(logits / cap)
