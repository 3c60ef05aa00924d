"""How many dispatches a Gated DeltaNet layer costs for one token, its projections aside."""

from unittest.mock import patch

import mlx.core as mx
from counting import PROJECTIONS, Dispatches, besides_projections

from mlx_linattn.layers.gated_delta import GatedDelta
from mlx_linattn.spec import GatedDeltaSpec
from mlx_linattn.state import Span

SPEC = GatedDeltaSpec(key_heads=2, value_heads=4, key_dim=32, value_dim=32, conv_width=4, norm_eps=1e-6)


def ours(backend, T=1):
    layer = GatedDelta(SPEC, 64)
    state = layer.make_state()
    x, span = mx.ones((1, T, 64)), Span((0,), (T,), T)
    mx.eval(layer.parameters(), x, layer(x, state, span), state.state)
    return Dispatches(backend).count(lambda: [layer(x, state, span), *state.state])


def stock():
    """The same layer of mlx_lm, its recurrence counted as the one kernel that it is on a Mac."""
    from mlx_lm.models import gated_delta, qwen3_5
    from mlx_lm.models.cache import ArraysCache

    args = qwen3_5.TextModelArgs(
        hidden_size=64,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
    )
    layer, cache, x = qwen3_5.GatedDeltaNet(args), ArraysCache(2), mx.ones((1, 1, 64))
    mx.eval(layer.parameters(), x, layer(x, cache=cache), cache[0], cache[1])
    counter = Dispatches()

    def step(q, k, v, g, beta, state, mask):
        return counter.launch("step", [q, k, v, g, beta, state], [v.shape, state.shape], [v.dtype, mx.float32])

    with patch.object(gated_delta, "gated_delta_ops", step):
        return counter.count(lambda: [layer(x, cache=cache), cache[0], cache[1]])


def test_a_decode_layer_costs_one_dispatch_besides_its_projections():
    for T in (1, 2, 8):
        counts = ours("metal", T)
        assert besides_projections(counts) == counts["delta_step"] == 1, counts


def test_stock_mlx_lm_needs_many_times_as_many():
    counts = stock()
    assert sum(n for name, n in counts.items() if name in PROJECTIONS) == 5
    assert besides_projections(counts) >= 12, counts


def test_plain_mlx_stays_within_its_budget():
    counts = ours("mlx")
    # Two of the matrix products are the state's.
    assert sum(counts.values()) - 5 <= 16, counts
