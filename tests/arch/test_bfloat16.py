"""With bfloat16 weights, gates and states stay float32, and long contexts do not drift away from float32 arithmetic."""

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

from mlx_linattn.layers.gated_delta import GatedDelta
from mlx_linattn.layers.kda import KimiDelta
from mlx_linattn.loading import load_model
from mlx_linattn.spec import GatedDeltaSpec, KdaSpec
from mlx_linattn.state import KVState, ModelState

PINNED = ("A_log", "dt_bias", "norm_weight", "correction_bias", "norm.weight", "layernorm.weight", "gate.weight")
HIDDEN = 32
SIZES = {"key_heads": 2, "value_heads": 2, "key_dim": 16, "value_dim": 16, "conv_width": 4, "norm_eps": 1e-6}
LAYERS = {
    "kimi": (KimiDelta, KdaSpec(**SIZES, decay_rank=16, gate_rank=16)),
    "ling": (KimiDelta, KdaSpec(**SIZES, decay_rank=None, gate_rank=None, lower_bound=-5.0)),
    "olmo": (GatedDelta, GatedDeltaSpec(**SIZES, beta_scale=2.0, separate_qkv=True)),
}


@pytest.mark.parametrize("name", ["kimi_linear", "olmo_hybrid", "bailing_hybrid_v3"])
def test_gates_norms_routers_and_states_are_float32(name, fixture_folder):
    model, _ = load_model(fixture_folder(name), dtype="bfloat16")
    for path, array in tree_flatten(model.parameters()):
        assert array.dtype == (mx.float32 if path.endswith(PINNED) else mx.bfloat16), path
    state = model.make_cache()
    for ids in ([[5, 6, 7, 8, 9]], [[10]]):
        assert model(ids, state).dtype == mx.bfloat16
        for layer in state:
            if isinstance(layer, KVState):
                assert {array.dtype for array in layer.state} == {mx.bfloat16}
            else:
                window, matrix = layer.arrays
                assert (window.dtype, matrix.dtype) == (mx.bfloat16, mx.float32)


@pytest.mark.parametrize("kind", LAYERS)
def test_4096_tokens_do_not_drift_from_float32(kind):
    """Decays of about 0.999, which bfloat16 rounds to 1, and small writes, so that the state remembers a thousand tokens."""
    make, spec = LAYERS[kind]
    layer, rng = make(spec, HIDDEN), np.random.default_rng(0)
    layer.update(tree_map(lambda x: mx.array(rng.normal(0, 0.2, x.shape)).astype(mx.bfloat16), layer.parameters()))
    slow = -9.0 if kind == "ling" else -7.0
    layer.A_log, layer.dt_bias = layer.A_log.astype(mx.float32), mx.full(layer.dt_bias.shape, slow)
    layer.norm_weight = mx.ones(layer.norm_weight.shape)
    x = mx.array(rng.normal(size=(1, 4096, HIDDEN))).astype(mx.bfloat16)
    x[..., 0] = 1.0
    beta = layer.b_proj if hasattr(layer, "b_proj") else layer.in_proj_b
    beta.weight[:, 0] = -6.0
    outputs, states = [], []
    for dtype in (mx.float32, mx.bfloat16):
        layer.update(tree_map(lambda w, to=dtype: w.astype(to) if w.ndim == 2 else w, layer.parameters()))
        state, pieces = ModelState([layer.make_state()]), []
        for i in range(0, 4096, 16):
            span = state.span(1, 16, None)
            with state.advancing(span):
                pieces.append(layer(x[:, i : i + 16].astype(dtype), state[0], span).astype(mx.float32))
            mx.eval(pieces[-1], state.arrays)
        outputs.append(np.array(mx.concatenate(pieces, axis=1))[0])
        states.append(np.array(state[0].arrays[1], np.float64))
    off = np.linalg.norm(states[1] - states[0]) / np.linalg.norm(states[0])
    error = np.sqrt(((outputs[1] - outputs[0]) ** 2).mean(-1))
    assert off < 0.006, f"the state is {off:.1%} off after 4096 tokens"
    assert error[-512:].mean() < 1.5 * error[:512].mean(), "later tokens are worse than early ones"
