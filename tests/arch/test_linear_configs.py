"""What the configs of MiniMax, Ling / Ring, RecurrentGemma, Jamba and Mamba can say, and what is made of it."""

import json
import math
from dataclasses import replace

import pytest
from helpers import FIXTURES, assert_close, golden, tolerance

from mlx_linattn.arch import family, minimax
from mlx_linattn.arch.recurrent_gemma import bfloat16
from mlx_linattn.errors import CheckpointError, UnsupportedModelError
from mlx_linattn.loading import load_model


def config(name, **changes):
    values = {**json.loads((FIXTURES / name / "config.json").read_text()), **changes}
    return {key: value for key, value in values.items() if value is not ...}


def spec(values):
    return family(values).spec(values)


@pytest.mark.parametrize("name", ["bailing_moe_linear", "bailing_hybrid_v25"])
def test_the_other_layer_count_of_lings_decays_can_be_asked_for(name, fixture_folder):
    folder, want = fixture_folder(name), golden(name)
    (folder / "config.json").write_text(json.dumps(config(name, lightning_decay_layer="previous")))
    model, _ = load_model(folder)
    assert_close(model(want["input_ids"]), want["logits_prefill_alt_slope"], tolerance(name), "layer - 1")
    assert abs(want["logits_prefill_alt_slope"] - want["logits_prefill"]).max() > 100 * tolerance(name)


@pytest.mark.parametrize(
    ("name", "count", "expected"),
    [
        ("bailing_moe_linear", ..., [0, 1]),  # layers 0 and 2 of 5 have Lightning attention
        ("bailing_hybrid_v25", ..., [0, 2]),
        ("bailing_moe_linear", "previous", [-1, 1]),
        ("bailing_hybrid_v25", "previous_from_zero", [0, 1]),
        ("bailing_moe_linear", "layer", [0, 2]),
    ],
)
def test_lings_decays_are_the_formula(name, count, expected):
    layers = spec(config(name, lightning_decay_layer=count)).layers
    for index, counted in zip((0, 2), expected):
        factor = 1 - counted / 4 + 1e-5
        for head, decay in enumerate(layers[index].mixer.decay):
            assert decay == pytest.approx(math.exp(-(2.0 ** (-2 * (head + 1))) * factor), rel=1e-12)


def test_an_unknown_layer_count_is_an_error():
    with pytest.raises(CheckpointError, match="lightning_decay_layer is 'next', but only 'layer' or"):
        spec(config("bailing_hybrid_v25", lightning_decay_layer="next"))


def test_slopes_of_head_counts_that_are_no_power_of_two():
    decay = spec(config("bailing_moe_linear", num_attention_heads=6, head_dim=16)).layers[0].mixer.decay
    slopes = [-math.log(number) / (1 + 1e-5) for number in decay]
    assert slopes == pytest.approx([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])


def test_both_spellings_of_minimax_are_one_model():
    original, renamed = spec(config("minimax_text_01")), spec(config("minimax_hf", rotary_dim=8))
    assert original == replace(renamed, model_type="minimax_text_01")
    assert original.layers[0].mixer_residual.alpha == 3.5565588200778455
    assert original.layers[0].mixer.norm_eps == 1e-6  # and not rms_norm_eps, which is 1e-5


def test_minimax_rotates_what_the_config_says():
    def dims(values):
        return spec(values).layers[3].mixer.rope.dims

    assert dims(config("minimax_text_01")) == 8
    assert dims(config("minimax_text_01", rotary_dim=...)) == 16
    assert dims(config("minimax_hf")) == 16
    assert dims(config("minimax_hf", rotary_dim=8)) == 8
    assert dims(config("minimax_hf", rope_parameters={"rope_theta": 1e7, "partial_rotary_factor": 0.5})) == 8


def test_a_converted_minimax_does_not_take_the_name_that_stock_mlx_lm_gives_to_another_model():
    assert minimax.MLX_TYPES["minimax"] == "minimax_text_01"
    assert spec(config("minimax_hf", model_type="minimax_text_01")).layers == spec(config("minimax_hf")).layers


def test_minimax_m2_is_not_taken_for_minimax_01():
    with pytest.raises(UnsupportedModelError, match="MiniMaxM2ForCausalLM"):
        spec(config("minimax_hf", architectures=["MiniMaxM2ForCausalLM"]))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("minimax_text_01", {"postnorm": False}, "postnorm"),
        ("minimax_text_01", {"shared_intermediate_size": 64}, "shared_intermediate_size"),
        ("minimax_text_01", {"attn_type_list": [0, 0, 2, 1]}, "attn_type_list"),
        ("minimax_hf", {"layer_types": ...}, "layer_types"),
        ("bailing_moe_linear", {"norm_head": True}, "norm_head"),
        ("bailing_moe_linear", {"rope_scaling": {"type": "yarn"}}, "rope_type"),
        ("recurrent_gemma", {"block_types": ["recurrent", "mamba"]}, "block_types"),
        ("recurrent_gemma", {"hidden_activation": "relu"}, "hidden_activation"),
        ("jamba", {"layers_block_type": ["mamba"]}, "layers_block_type"),
        ("jamba", {"mamba_dt_rank": "half"}, "mamba_dt_rank"),
        ("jamba", {"sliding_window": 512}, "sliding_window"),
        ("mamba", {"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_what_no_code_honours_is_an_error_that_names_it(name, changes, message):
    with pytest.raises(CheckpointError, match=message):
        spec(config(name, **changes))


def test_recurrent_gemmas_embedding_scale_is_rounded_as_the_reference_does():
    assert spec(config("recurrent_gemma", hidden_size=2560, head_dim=...)).embedding_scale == 50.5  # not 50.596
    assert spec(config("recurrent_gemma", hidden_size=4096, head_dim=...)).embedding_scale == 64.0
    assert spec(config("recurrent_gemma")).embedding_scale == 8.9375  # sqrt(80) is 8.944
    assert spec(config("recurrent_gemma", embeddings_scale_by_sqrt_dim=...)).embedding_scale == 8.9375
    assert spec(config("recurrent_gemma", embeddings_scale_by_sqrt_dim=False)).embedding_scale == 1.0
    assert [bfloat16(x) for x in (1.00390625, 1.01171875, -50.596)] == [1.0, 1.015625, -50.5]  # ties to even


def test_recurrent_gemmas_pattern_repeats_under_either_name():
    changes = {"block_types": ..., "_block_types": ["recurrent", "attention"], "num_hidden_layers": 5}
    kinds = [type(layer.mixer).__name__ for layer in spec(config("recurrent_gemma", **changes)).layers]
    assert kinds == ["RgLruSpec", "AttentionSpec", "RgLruSpec", "AttentionSpec", "RgLruSpec"]


def test_recurrent_gemma_rotates_half_of_a_head_unless_told_otherwise():
    for factor, dims in ((..., 10), (0.5, 10), (0.2, 4)):
        assert spec(config("recurrent_gemma", partial_rotary_factor=factor)).layers[2].mixer.rope.dims == dims


def test_jambas_layers_by_period_and_by_list():
    listed = ["mamba", "attention", "mamba", "mamba"]
    assert spec(config("jamba", layers_block_type=listed)) == spec(config("jamba"))
    moe = [type(layer.mlp).__name__ for layer in spec(config("jamba", num_hidden_layers=6)).layers]
    assert moe == ["MlpSpec", "MoeSpec"] * 3
    assert spec(config("jamba", mamba_dt_rank="auto")).layers[0].mixer.step_rank == 4
