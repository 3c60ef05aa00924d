"""What Lightning, RG-LRU and Mamba models remember: how much, in which dtype, and how exactly over a long run."""

import gc

import mlx.core as mx
import numpy as np
import pytest
from helpers import assert_close

from mlx_linattn.loading import load_model
from mlx_linattn.state import KVState, WindowState

LIGHTNING = ["minimax_text_01", "bailing_moe_linear", "bailing_hybrid_v25"]
SCANS = ["recurrent_gemma", "jamba", "mamba", "falcon_mamba"]
FLA = ["fla_delta_net", "fla_kda", "fla_linear_attn", "fla_retnet", "fla_gla", "fla_hgrn2"]


@pytest.fixture
def no_buffer_cache():
    """Without it an array may lie in a recycled buffer that is larger than the array."""
    limit = mx.set_cache_limit(0)
    yield
    mx.set_cache_limit(limit)


def tokens(T, vocab=88, seed=3):
    return mx.array(np.random.default_rng(seed).integers(0, vocab, (1, T)))


@pytest.mark.parametrize("name", LIGHTNING + SCANS + FLA)
def test_memory_held_is_the_states_own(name, fixture_folder, no_buffer_cache):
    model, _ = load_model(fixture_folder(name))
    prompt, step = tokens(700), tokens(1)
    mx.eval(prompt, step, model(step), model.parameters())
    gc.collect()
    before = mx.get_active_memory()
    state = model.make_cache()
    mx.eval(model(prompt, state), state.arrays)
    gc.collect()
    assert mx.get_active_memory() - before == state.nbytes, "after prefill"
    for _ in range(5):
        mx.eval(model(step, state), state.arrays)
    gc.collect()
    assert mx.get_active_memory() - before == state.nbytes, "after decoding"


@pytest.mark.parametrize("name", ["recurrent_gemma", "mamba", "falcon_mamba", "fla_delta_net", "fla_gla", "fla_retnet"])
def test_memory_is_constant(name, fixture_folder, no_buffer_cache):
    model, _ = load_model(fixture_folder(name))
    step, state, sizes = tokens(1), model.make_cache(), {}
    mx.eval(step, model(step), model.parameters())
    gc.collect()
    before = mx.get_active_memory()
    for read in (1, 1023, 1, 3072, 1, 4095, 1):
        mx.eval(model(tokens(read), state), state.arrays)
        gc.collect()
        sizes[state.offset] = state.nbytes, mx.get_active_memory() - before
    assert state.offset > 8192
    assert len(set(sizes.values())) == 1, sizes


@pytest.mark.parametrize("name", LIGHTNING + SCANS)
def test_recurrent_state_and_decays_are_float32_in_a_bfloat16_model(name, fixture_folder):
    folder = fixture_folder(name)
    model, _ = load_model(folder, dtype="bfloat16")
    state = model.make_cache()
    logits = model(tokens(20), state)
    assert logits.dtype == mx.bfloat16
    for layer, kept in zip(model.layers, state):
        if isinstance(kept, (KVState, WindowState)):
            assert {array.dtype for array in kept.state} == {mx.bfloat16}
            continue
        *window, matrix = kept.arrays
        assert matrix.dtype == mx.float32
        assert {array.dtype for array in window} <= {mx.bfloat16}
        for parameter in layer.mixer.float32:
            if parameter in layer.mixer:
                assert layer.mixer[parameter].dtype == mx.float32, parameter
    if name in LIGHTNING:
        mixer = model.layers[0].mixer
        assert mixer._decay.dtype == mx.float32
        assert mixer._decay.tolist() == mx.array(mixer.spec.decay).tolist()


@pytest.mark.parametrize("name", ["minimax_text_01", "recurrent_gemma", "jamba", "mamba"])
def test_hundreds_of_single_steps_end_where_one_prefill_does(name, fixture_folder):
    model, _ = load_model(fixture_folder(name))
    ids, stepped, whole = tokens(400), model.make_cache(), model.make_cache()
    for t in range(ids.shape[1]):
        model(ids[:, t : t + 1], stepped)
        mx.eval(stepped.arrays)
    model(ids, whole)
    for one, other in zip(stepped, whole):
        if not isinstance(one, KVState):
            for a, b in zip(one.arrays, other.arrays):
                assert_close(a, b, 2e-4 * max(1.0, float(mx.abs(b).max())), name)


def test_mambas_residual_stream_is_float32_where_the_config_says_so(fixture_folder):
    model, _ = load_model(fixture_folder("mamba"), dtype="bfloat16")
    seen = []

    class Watched(type(model.layers[1])):
        def __call__(self, x, *rest):
            seen.append(x.dtype)
            return super().__call__(x, *rest)

    model.layers[1].__class__ = Watched
    assert model(tokens(5)).dtype == mx.bfloat16
    assert seen == [mx.float32]
