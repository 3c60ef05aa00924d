"""Multi-head latent attention: absorbed form against the textbook form, and what it keeps in memory."""

from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from helpers import assert_close
from mlx.utils import tree_flatten, tree_map

from mlx_linattn.layers.mla import HeadLinear, LatentAttention
from mlx_linattn.spec import MlaSpec, RopeSpec
from mlx_linattn.state import KVOptions, ModelState

HIDDEN = 64
KEEP_ALL = KVOptions()
SIZES = {"heads": 4, "rank": 32, "nope_dim": 16, "rope_dim": 8, "value_dim": 24, "norm_eps": 1e-6}
SPECS = {
    "no positions": MlaSpec(**SIZES, rope=None),
    "interleaved": MlaSpec(**SIZES, rope=RopeSpec(8, 1e4, interleaved=True), query_rank=20, output_gate="head"),
    "halves": MlaSpec(**SIZES, rope=RopeSpec(8, 1e4), output_gate="feature"),
}


def layer(spec, seed=0, std=0.3):
    module = LatentAttention(spec, HIDDEN)
    rng = np.random.default_rng(seed)
    module.update(tree_map(lambda x: mx.array(rng.normal(0, std, x.shape).astype(np.float32)), module.parameters()))
    return module


def run(module, pieces, options=KEEP_ALL):
    state = ModelState([module.make_state()], options)
    outputs = []
    for x in pieces:
        span = state.span(*x.shape[:2], None)
        with state.advancing(span):
            outputs.append(module(x, state[0], span))
    return mx.concatenate(outputs, axis=1), state


def per_head(module, x):
    """The textbook form in float64: keys and values of every head from the latents."""
    spec = module.spec
    w = {name: np.array(array, np.float64) for name, array in _flat(module).items()}
    x = np.array(x, np.float64)[0]
    T = len(x)

    def norm(y, name):
        return y / np.sqrt((y**2).mean(-1, keepdims=True) + spec.norm_eps) * w[f"{name}.weight"]

    def rotate(y):  # [..., T, rope_dim]
        if spec.rope is None:
            return y
        half = spec.rope_dim // 2
        angle = np.arange(T)[:, None] * spec.rope.theta ** (-np.arange(half) / half)
        a, b = (y[..., 0::2], y[..., 1::2]) if spec.rope.interleaved else (y[..., :half], y[..., half:])
        a, b = a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)
        return np.stack([a, b], -1).reshape(y.shape) if spec.rope.interleaved else np.concatenate([a, b], -1)

    if spec.query_rank is None:
        q = x @ w["q_proj.weight"].T
    else:
        q = norm(x @ w["q_a_proj.weight"].T, "q_a_layernorm") @ w["q_b_proj.weight"].T
    q = q.reshape(T, spec.heads, -1).swapaxes(0, 1)
    down = x @ w["kv_a_proj_with_mqa.weight"].T
    latent, shared = norm(down[:, : spec.rank], "kv_a_layernorm"), rotate(down[:, spec.rank :])
    out = []
    for h in range(spec.heads):
        k = np.concatenate([latent @ w["embed_q.weight"][h], shared], -1)
        v = latent @ w["unembed_out.weight"][h].T
        query = np.concatenate([q[h, :, : spec.nope_dim], rotate(q[h, :, spec.nope_dim :])], -1)
        scores = query @ k.T / np.sqrt(spec.nope_dim + spec.rope_dim)
        scores[np.triu_indices(T, 1)] = -np.inf
        p = np.exp(scores - scores.max(-1, keepdims=True))
        out.append(p / p.sum(-1, keepdims=True) @ v)
    o = np.stack(out, 1)  # [T, H, value_dim]
    if spec.output_gate is not None:
        o = o / (1 + np.exp(-(x @ w["g_proj.weight"].T).reshape(T, spec.heads, -1)))
    return o.reshape(T, -1) @ w["o_proj.weight"].T


def _flat(module):
    return dict(tree_flatten(module.parameters()))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("cuts", [(), (1,), (7, 8, 9)])
def test_absorbed_form_is_the_textbook_form(spec, cuts):
    module = layer(spec)
    x = mx.array(np.random.default_rng(1).normal(size=(1, 21, HIDDEN)).astype(np.float32))
    edges = [0, *cuts, 21]
    got, _ = run(module, [x[:, a:b] for a, b in pairwise(edges)])
    assert_close(got[0], per_head(module, x), 2e-5, "latent attention")


def test_tiles_of_a_long_context_are_the_textbook_form():
    module = layer(SPECS["interleaved"])
    x = mx.array(np.random.default_rng(2).normal(size=(1, 2100, HIDDEN)).astype(np.float32))
    got, _ = run(module, [x[:, :1500], x[:, 1500:2099], x[:, 2099:]])
    assert_close(got[0], per_head(module, x), 5e-5, "latent attention over three tiles")


def test_the_cache_holds_one_latent_a_token_and_nothing_else():
    module = layer(SPECS["halves"])
    x = mx.zeros((1, 1000, HIDDEN))
    _, state = run(module, [x])
    columns = 1024  # 1000, up to a whole number of growth steps
    assert state.kv_nbytes == columns * (32 + 8) * 4
    assert [array.shape for array in state[0].state] == [(1, 1, columns, 40)]


def test_a_restored_cache_goes_on_as_if_nothing_had_happened():
    module = layer(SPECS["interleaved"])
    x = mx.array(np.random.default_rng(3).normal(size=(1, 30, HIDDEN)).astype(np.float32))
    whole, _ = run(module, [x])
    state = ModelState([module.make_state()])
    span = state.span(1, 20, None)
    with state.advancing(span):
        module(x[:, :20], state[0], span)
    snapshot = state.snapshot()
    for piece in (x[:, 5:12], x[:, 20:]):
        span = state.span(1, piece.shape[1], None)
        with state.advancing(span):
            got = module(piece, state[0], span)
        if piece.shape[1] == 7:
            state.restore(snapshot)
    assert_close(got, whole[:, 20:], 1e-5, "after restoring")


@pytest.mark.parametrize(("bits", "within"), [(8, 0.02), (4, 0.3)])
def test_latents_in_few_bits_give_nearly_the_same(bits, within):
    # As in real models, no group has both latents and rotated features, whose sizes differ.
    module = layer(MlaSpec(4, 64, 16, 32, 24, RopeSpec(32, 1e4, interleaved=True), 1e-6), std=0.15)
    x = mx.array(np.random.default_rng(4).normal(size=(1, 400, HIDDEN)).astype(np.float32))
    pieces = [x[:, :300], x[:, 300:399], x[:, 399:]]
    exact, full = run(module, pieces)
    got, small = run(module, pieces, KVOptions(kv_bits=bits, kv_group_size=32))
    error, size = mx.linalg.norm(got - exact).item(), mx.linalg.norm(exact).item()
    assert error < within * size, f"{bits}-bit latents are {error / size:.1%} off"
    assert small.kv_nbytes == full.kv_nbytes * (bits + 2) // 32  # a float32 scale and offset for 32 numbers


def test_a_bounded_cache_of_latents_is_exact_until_it_is_full():
    module = layer(SPECS["interleaved"])
    x = mx.array(np.random.default_rng(5).normal(size=(1, 60, HIDDEN)).astype(np.float32))
    pieces = [x[:, i : i + 6] for i in range(0, 60, 6)]
    exact, _ = run(module, pieces)
    got, state = run(module, pieces, KVOptions(max_kv_size=36))
    assert_close(got[:, :36], exact[:, :36], 1e-5, "before it is full")
    assert not np.allclose(got[:, 48:], exact[:, 48:], atol=1e-3)
    assert state.nbytes == 36 * 40 * 4


def test_transient_memory_does_not_grow_with_heads_times_context():
    spec = MlaSpec(heads=16, rank=64, nope_dim=64, rope_dim=16, value_dim=64, rope=None, norm_eps=1e-6)
    module = layer(spec)
    peaks = []
    for length in (4096, 8192):
        state = ModelState([module.make_state()])
        state.counts = (length,)
        state[0].exact, state[0].length = [mx.random.normal((1, 1, length + 256, 80))], length
        mx.eval(state[0].exact, module.parameters())
        x = mx.zeros((1, 64, HIDDEN))
        mx.eval(x)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(module(x, state[0], state.span(1, 64, None)))
        peaks.append(mx.get_peak_memory() - before)
    # Per-head keys and values of 4096 more tokens would be 16 * 128 * 4096 * 4 bytes = 32 MiB.
    assert peaks[1] - peaks[0] < 4 * 2**20


@pytest.mark.parametrize(
    "options", [KVOptions(kv_bits=8), KVOptions(kv_bits=8, quantized_kv_start=9), KVOptions(max_kv_size=40)]
)
def test_latents_can_be_quantized_or_bounded(options):
    spec = MlaSpec(heads=4, rank=48, nope_dim=16, rope_dim=16, value_dim=24, norm_eps=1e-6, rope=RopeSpec(16, 1e4))
    module = layer(spec)
    x = mx.array(np.random.default_rng(4).normal(size=(1, 30, HIDDEN)).astype(np.float32))
    exact, _ = run(module, [x])
    whole, state = run(module, [x], options)
    steps, _ = run(module, [x[:, :7], *(x[:, t : t + 1] for t in range(7, 30))], options)
    assert_close(whole, exact, 0.05 * float(mx.abs(exact).max()), "against exact latents")
    assert_close(steps, whole, 0.05 * float(mx.abs(exact).max()), "in pieces")
    if options.kv_bits and not options.quantized_kv_start:
        assert state.kv_nbytes == 256 * (64 + 8)  # a byte a feature, and a float32 scale and bias
    if options.max_kv_size:
        assert_close(steps, exact, 2e-5, "nothing was forgotten yet")
        assert state.nbytes == 40 * 64 * 4


@pytest.mark.parametrize(("bits", "mode"), [(8, "affine"), (4, "affine"), (4, "mxfp4")])
def test_a_quantized_head_linear_is_its_dequantized_matrix(bits, mode):
    linear = HeadLinear(3, 64, 10)
    linear.weight = mx.random.normal((3, 10, 64), key=mx.random.key(0))
    quantized = linear.to_quantized(32, bits, mode)
    linear.weight = mx.dequantize(
        quantized.weight, quantized.scales, quantized.get("biases"), group_size=32, bits=bits, mode=mode
    )
    for B, T in ((1, 1), (2, 5)):
        x = mx.random.normal((B, 3, T, 64), key=mx.random.key(1))
        assert quantized(x).shape == (B, 3, T, 10)
        assert_close(quantized(x), linear(x), 1e-4, f"quantized {mode}")
