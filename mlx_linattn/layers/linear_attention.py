from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from .. import ops
from ..cuts import Block, columns, heads, rows
from ..errors import RequestError
from ..spec import KeyDecay, LinearAttentionSpec, LowRankDecay
from ..state import RecurrentState
from .part import Part
from .rope import rotate


class LinearAttention(Part):
    """Linear attention without a delta rule: RetNet, GLA, HGRN2, and kernel linear attention with or without normaliser.

    Its state is one float32 matrix per head, with the normaliser as one more row where the spec asks for it, and the
    peaks of the exponentials where the feature map is "exp".
    """

    float32 = ("norm_weight", "decay_bound")

    def __init__(self, spec: LinearAttentionSpec, hidden_size: int):
        super().__init__()
        if spec.normalize and spec.decay is not None:
            raise RequestError("linear attention: normalize and decay do not go together; leave one of them out")
        if spec.feature_map == "exp" and not spec.normalize:
            raise RequestError('linear attention: the feature map "exp" has no bound unless normalize is set')
        self.spec = spec
        keys, values = spec.kv_heads * spec.key_dim, spec.kv_heads * spec.value_dim
        self.q_proj = nn.Linear(hidden_size, spec.heads * spec.key_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, values, bias=False)
        if isinstance(spec.decay, KeyDecay):
            self.f_proj = nn.Linear(hidden_size, keys, bias=False)
            if spec.decay.bounded:
                self.decay_bound = mx.zeros((keys,))
        else:
            self.k_proj = nn.Linear(hidden_size, keys, bias=False)
        if isinstance(spec.decay, LowRankDecay):
            self.decay_down = nn.Linear(hidden_size, spec.decay.rank, bias=False)
            self.decay_up = nn.Linear(spec.decay.rank, keys, bias=True)
        elif isinstance(spec.decay, tuple):
            self._decay = mx.array(spec.decay, mx.float32)
        if spec.feature_map in LEARNED_MAPS:
            self.feature_map_q = LEARNED_MAPS[spec.feature_map](spec.key_dim)
            self.feature_map_k = LEARNED_MAPS[spec.feature_map](spec.key_dim)
        if spec.output_gate:
            self.g_proj = nn.Linear(hidden_size, spec.heads * spec.value_dim, bias=False)
        self.norm_weight = mx.ones((spec.value_dim * (spec.heads if spec.norm_whole else 1),))
        self.o_proj = nn.Linear(spec.heads * spec.value_dim, hidden_size, bias=False)

    @staticmethod
    def share(spec: LinearAttentionSpec, deal):
        first, end = deal.range(spec.heads)
        decay = spec.decay[first:end] if isinstance(spec.decay, tuple) else spec.decay
        count, kv_heads = deal.even(spec.heads, "heads"), deal.spread(spec.kv_heads, "key heads")
        return replace(spec, heads=count, kv_heads=kv_heads, decay=decay)

    @staticmethod
    def cuts(spec: LinearAttentionSpec):
        k, v = Block(spec.kv_heads, spec.key_dim), Block(spec.kv_heads, spec.value_dim)
        q, o = Block(spec.heads, spec.key_dim), Block(spec.heads, spec.value_dim)
        return {
            "q_proj": rows(q), "k_proj": rows(k), "v_proj": rows(v), "f_proj": rows(k), "decay_bound": columns(k),
            "decay_up": rows(k), "g_proj": rows(o), "o_proj": columns(o),
            **({"norm_weight": columns(o)} if spec.norm_whole else {}),
        }  # fmt: skip

    @staticmethod
    def state_cuts(spec: LinearAttentionSpec):
        each = Block(spec.heads)
        return heads(each), rows(each)  # matrix, peaks [B, H, Dk]

    def make_state(self) -> RecurrentState:
        return RecurrentState(2 if self.spec.feature_map == "exp" else 1)

    def __call__(self, x, state: RecurrentState, span):
        spec = self.spec
        decay, tied_key = self._decay_and_key(x)
        q = self._heads(self.q_proj(x), spec.key_dim)
        k = self._heads(self.k_proj(x), spec.key_dim) if tied_key is None else tied_key
        v = self._heads(self.v_proj(x), spec.value_dim)
        if spec.rope is not None:
            q, k = (rotate(y.swapaxes(1, 2), spec.rope, span).swapaxes(1, 2) for y in (q, k))
        if spec.heads != spec.kv_heads:
            k, v = (mx.repeat(y, spec.heads // spec.kv_heads, axis=2) for y in (k, v))
        if spec.normalize:
            o = self._normalized(q, k, v, state, span)
        else:
            q = self._features(q, "q")
            k = self._features(k, "k") if tied_key is None else k
            o, state.arrays[0] = ops.recurrence(
                q * q.shape[-1] ** -0.5, k, v, decay, None, state.arrays[0], delta=False, lengths=span.lengths
            )
        return self.o_proj(self._normed(o, x))

    def _heads(self, x, width: int):
        return x.reshape(*x.shape[:2], -1, width)

    def _decay_and_key(self, x):
        """The decay (None, [H] or [B, T, H, Dk], float32), and the key where it follows from the decay."""
        spec = self.spec
        if isinstance(spec.decay, tuple):
            return self._decay, None
        if isinstance(spec.decay, LowRankDecay):
            log_decay = -nn.softplus(-self.decay_up(self.decay_down(x)).astype(mx.float32)) / spec.decay.normalizer
            if spec.decay.log_minimum is not None:
                log_decay = mx.maximum(log_decay, spec.decay.log_minimum)
            decay = self._heads(mx.exp(log_decay), spec.key_dim)
            return mx.repeat(decay, spec.heads // spec.kv_heads, axis=2), None
        if isinstance(spec.decay, KeyDecay):
            forget = mx.sigmoid(self.f_proj(x).astype(mx.float32))
            if spec.decay.bounded:
                forget = self.decay_bound + (1 - self.decay_bound) * forget
            forget = self._heads(forget, spec.key_dim)
            return forget, 1 - forget
        return None, None

    def _features(self, x, which: str):
        name = self.spec.feature_map
        return self[f"feature_map_{which}"](x) if name in LEARNED_MAPS else ops.map_features(x, name)

    def _normalized(self, q, k, v, state, span):
        name = self.spec.feature_map
        if name in LEARNED_MAPS:
            q, k, name = self._features(q, "q"), self._features(k, "k"), "identity"
        before = None if state.arrays[0] is None else tuple(state.arrays)
        o, after = ops.kernel_attention(q, k, v, before, feature_map=name, lengths=span.lengths)
        state.arrays = list(after)
        return o

    def _normed(self, o, x):
        spec = self.spec
        B, T = o.shape[:2]
        mean_square = None
        if spec.norm_whole:
            o = o.reshape(B, T, -1)
            (mean_square,) = self.ranks.mean_square(o)
        if spec.output_gate:
            gate = self.g_proj(x).reshape(o.shape)
            o = ops.norm_then_gate(o, self.norm_weight, gate, spec.norm_eps, spec.output_gate, mean_square=mean_square)
        else:
            o = ops.rms_norm(o, self.norm_weight, spec.norm_eps, mean_square)
        return o.reshape(B, T, -1)


class ElementwiseProduct(nn.Module):
    """phi(x) = (W1 x + b1) * (W2 x + b2), a quadratic kernel of either sign."""

    def __init__(self, width: int):
        super().__init__()
        self.layer1 = nn.Linear(width, width)
        self.layer2 = nn.Linear(width, width)

    def __call__(self, x):
        return self.layer1(x).astype(mx.float32) * self.layer2(x).astype(mx.float32)


class RectifiedLinear(nn.Module):
    """phi(x) = relu(W x)    (T2R: Kasai et al. 2021)."""

    def __init__(self, width: int):
        super().__init__()
        self.layer = nn.Linear(width, width, bias=False)

    def __call__(self, x):
        return ops.map_features(self.layer(x), "relu")


class Hedgehog(nn.Module):
    """phi(x) = softmax([2 y, -2 y]), y = W x + b    (Zhang et al. 2024): twice as many features as x has."""

    def __init__(self, width: int):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def __call__(self, x):
        y = 2 * self.layer(x).astype(mx.float32)
        return mx.softmax(mx.concatenate([y, -y], axis=-1), axis=-1)


LEARNED_MAPS = {"elementwise_product": ElementwiseProduct, "t2r": RectifiedLinear, "hedgehog": Hedgehog}
