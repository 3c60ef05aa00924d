"""Memory is estimated before it is taken, and refused in a sentence with numbers."""

import mlx.core as mx
import pytest
from helpers import FIXTURES

from mlx_linattn import budget, generate_step
from mlx_linattn.errors import LinAttnError, MemoryLimitError, RequestError
from mlx_linattn.generation import prefill
from mlx_linattn.loading import load_model
from mlx_linattn.state import KVOptions

NAMES = [name for name in ("qwen3_next", "kimi_linear", "recurrent_gemma", "jamba", "fla_gla", "minimax_text_01")
         if (FIXTURES / name / "config.json").exists()]  # fmt: skip
IDS = [8 + (i * i) % 70 for i in range(600)]


@pytest.fixture(scope="module")
def demo():
    return load_model("demo", dtype="float32")[0]


@pytest.mark.parametrize("name", NAMES)
def test_the_state_takes_what_was_estimated(name, fixture_folder):
    model, _ = load_model(fixture_folder(name), dtype="float32")
    state = model.make_cache()
    need = budget.estimate(model, state, 300, 300)
    assert state.counts == () and state.nbytes == 0, "estimating changed the state"
    assert budget.fixed_nbytes(model, state) > 0
    prefill(model, IDS[:300], state, 300)
    assert need.state == state.nbytes
    more = budget.estimate(model, state, 300, 300)
    held = state.nbytes
    prefill(model, IDS[300:], state, 300)
    assert more.state == state.nbytes - held


def test_temporary_memory_is_bounded_by_the_estimate_and_not_far_below(demo):
    for tokens in (64, 256, 600):
        state = demo.make_cache()
        state.reserve(1000)
        prefill(demo, IDS[:8], state, 8)
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        prefill(demo, IDS[:tokens], state, tokens)
        used = mx.get_peak_memory() - before
        assert used <= budget.temporary(demo, tokens) <= 4 * used, tokens


def test_the_piece_of_a_prompt_is_chosen_from_the_limit(demo):
    state = demo.make_cache()
    held = mx.get_active_memory()
    roomy = budget.prefill_step(demo, state, 5000, held + 10**9)
    tight = held + budget.estimate(demo, state, 5000, 256).state + budget.temporary(demo, 256) + 10_000
    assert roomy == 2048
    assert budget.prefill_step(demo, state, 5000, tight) == 256
    with pytest.raises(MemoryLimitError):
        budget.prefill_step(demo, state, 5000, tight, step=2048)
    assert budget.prefill_step(demo, state, 5000, float("inf"), step=2048) == 2048


def test_a_refusal_allocates_nothing_and_says_how_much(demo):
    active = mx.get_active_memory()
    with pytest.raises(
        MemoryLimitError, match=r"reading 5,000 tokens needs .*held already.*temporary.*memory_limit"
    ) as error:
        next(generate_step(IDS * 8 + IDS[:200], demo, memory_limit=active + 2_000_000))
    assert mx.get_active_memory() <= active
    assert isinstance(error.value, LinAttnError) and isinstance(error.value, MemoryError)


def test_generating_past_the_limit_stops_between_tokens(demo):
    state = demo.make_cache()
    limit = budget.estimate(demo, state, 8, 64).total + 300_000
    tokens = []
    with pytest.raises(MemoryLimitError):
        for token, _ in generate_step(
            IDS[:8], demo, max_tokens=-1, prompt_cache=state, memory_limit=limit, prefill_step_size=8
        ):
            tokens.append(token)
            assert len(tokens) < 3000
    assert 255 <= len(tokens) <= 512
    assert state.offset - 8 - len(tokens) in (0, 1)


def test_weights_beyond_the_limit_are_refused_before_they_are_read():
    active = mx.get_active_memory()
    with pytest.raises(MemoryLimitError, match=r"its weights take 8\.51 MB"):
        load_model("demo", memory_limit=1e6)
    assert mx.get_active_memory() <= active + 1000
    load_model("demo", memory_limit=1e6, lazy=True)
    load_model("demo", memory_limit=float("inf"))


def test_the_working_set_is_a_plausible_machine():
    assert 10**8 < budget.working_set() < 10**13
    assert budget.checkpoint_bytes() * budget.CHECKPOINT_SHARE <= budget.working_set()


@pytest.mark.parametrize("options", [{"max_kv_size": 40}, {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 5}])
def test_generation_takes_mlx_lms_cache_options(demo, options):
    state = demo.make_cache()
    tokens = [token for token, _ in generate_step(IDS[:60], demo, max_tokens=4, prompt_cache=state, **options)]
    assert state.options == KVOptions(**options)
    fresh = demo.make_cache(KVOptions(**options))
    logits = demo(mx.array([IDS[:60]]), fresh)[:, -1]
    for token in tokens:
        assert mx.argmax(logits).item() == token
        logits = demo(mx.array([[token]]), fresh)[:, -1]
    with pytest.raises(RequestError, match="stored in another way"):
        next(generate_step([8], demo, prompt_cache=state, max_kv_size=99))
