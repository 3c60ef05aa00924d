"""Kimi-Linear, Kimi-K3, OLMo-Hybrid and Ling-3 against their references' logits and against stock mlx_lm, in every layout."""

import json

import mlx.core as mx
import pytest
import stock
from helpers import assert_close, check_golden, golden, largest_difference, tolerance

from mlx_linattn import arch
from mlx_linattn.convert import convert
from mlx_linattn.errors import CheckpointError, UnsupportedModelError
from mlx_linattn.loading import load_model
from mlx_linattn.ops import use_backend
from mlx_linattn.weights.checkpoint import Checkpoint

FIXTURES = ["kimi_linear", "kimi_k3", "olmo_hybrid", "bailing_hybrid_v3"]


def edit_config(folder, **changes):
    """Change keys of a folder's config.json; None removes one."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    text = config.get("text_config", config)
    text |= changes
    for key in [key for key, value in changes.items() if value is None]:
        del text[key]
    file.write_text(json.dumps(config))
    return folder


def rewrite(folder, change, layout="pt"):
    """Apply ``change`` to a folder's tensors, given and returned as a dict."""
    file = folder / "model.safetensors"
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    tensors = {name: mx.array(array) for name, array in mx.load(str(file)).items()}
    mx.eval(tensors)
    mx.save_safetensors(str(file), change(tensors), metadata={"format": layout})
    return folder


@pytest.mark.parametrize("name", FIXTURES)
def test_logits_are_the_references(name, fixture_folder):
    model, _ = load_model(fixture_folder(name), dtype="float32")
    check_golden(model, name)


@pytest.mark.parametrize("name", FIXTURES)
def test_logits_with_the_reference_backend(name, fixture_folder):
    model, _ = load_model(fixture_folder(name), dtype="float32")
    with use_backend("reference"):
        check_golden(model, name)


@pytest.mark.parametrize("name", FIXTURES)
def test_stock_mlx_lm_agrees_on_the_published_files(name, fixture_folder):
    folder = fixture_folder(name)
    ours, _ = load_model(folder, dtype="float32")
    theirs = stock.stock_model(folder)
    assert stock.difference(ours, theirs, name) <= tolerance(name)


@pytest.mark.parametrize("name", FIXTURES)
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_stock_mlx_lm_loads_what_we_convert(bits, name, fixture_folder, tmp_path):
    options = {} if bits is None else {"quantize": True, "q_bits": bits, "q_group_size": 32}
    convert(fixture_folder(name), tmp_path / "mlx", **options)
    ours, _ = load_model(tmp_path / "mlx")
    theirs = stock.stock_model(tmp_path / "mlx")
    assert stock.difference(ours, theirs, name) <= tolerance(name)
    if bits is None:
        check_golden(ours, name)


def test_router_biases_stay_float32_in_a_bfloat16_conversion(fixture_folder, tmp_path):
    for name, bias in (("kimi_linear", "e_score_correction_bias"), ("bailing_hybrid_v3", "expert_bias")):
        target = tmp_path / f"{name}_mlx"
        convert(fixture_folder(name), target, dtype="bfloat16")
        tensors = Checkpoint(target).tensors
        assert {info.dtype for tensor, info in tensors.items() if tensor.endswith(bias)} == {"F32"}


@pytest.mark.parametrize("name", FIXTURES)
def test_a_folder_that_stock_mlx_lm_wrote_loads(name, fixture_folder, tmp_path):
    converted = stock.convert(fixture_folder(name), tmp_path / "mlx")
    model, _ = load_model(converted, dtype="float32")
    check_golden(model, name)


@pytest.mark.parametrize("name", FIXTURES)
def test_a_folder_that_stock_mlx_lm_quantized_gives_its_logits(name, fixture_folder, tmp_path):
    converted = stock.convert(fixture_folder(name), tmp_path / "mlx", {"group_size": 32, "bits": 8})
    ours, _ = load_model(converted)
    theirs = stock.stock_model(converted)
    assert stock.difference(ours, theirs, name) <= 1e-3


@pytest.mark.parametrize("bits", [None, 8])
def test_kimi_in_mlx_layout_before_kv_b_proj_was_split(bits, fixture_folder, tmp_path):
    source = fixture_folder("kimi_linear")
    options = None if bits is None else {"group_size": 32, "bits": bits}
    folder = stock.convert(source, tmp_path / "old", options)
    module = "model.layers.3.self_attn.kv_b_proj"
    whole = mx.array(mx.load(str(source / "model.safetensors"))[f"{module}.weight"])
    parts = [whole] if bits is None else mx.quantize(whole, 32, bits)

    def as_it_was(tensors):
        kept = {name: array for name, array in tensors.items() if "embed_q" not in name and "unembed_out" not in name}
        return kept | {f"{module}.{part}": array for part, array in zip(("weight", "scales", "biases"), parts)}

    rewrite(folder, as_it_was, "mlx")
    ours, _ = load_model(folder, dtype="float32")
    exact = load_model(source, dtype="float32")[0]
    for part in ("embed_q", "unembed_out"):
        got, want = (model.layers[3].mixer[part].weight for model in (ours, exact))
        assert_close(got, want, 0.0 if bits is None else mx.abs(want).max().item() / 100, part)


def test_q_k_and_v_may_be_quantized_differently(fixture_folder, tmp_path):
    def mixed(path, _):
        return {"group_size": 32, "bits": 8} if path.endswith("v_proj") else True

    options = {"group_size": 32, "bits": 4, "quant_predicate": mixed}
    for name in ("kimi_linear", "olmo_hybrid", "bailing_hybrid_v3"):
        converted = stock.convert(fixture_folder(name), tmp_path / f"{name}_mixed", options)
        ours, _ = load_model(converted)
        theirs = stock.stock_model(converted)
        assert stock.difference(ours, theirs, name) <= 1e-3


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", [name for name in FIXTURES if name != "kimi_k3"])
def test_a_config_that_transformers_saved_means_the_same(name, fixture_folder):
    from transformers import AutoConfig

    folder = fixture_folder(name)
    AutoConfig.from_pretrained(folder).save_pretrained(folder)
    model, _ = load_model(folder, dtype="float32")
    check_golden(model, name)


def test_kimi_dense_layers_saved_under_the_mixtures_name(fixture_folder):
    folder = fixture_folder("kimi_linear")
    old, new = "model.layers.0.mlp.", "model.layers.0.block_sparse_moe."
    rewrite(folder, lambda tensors: {name.replace(old, new): array for name, array in tensors.items()})
    model, _ = load_model(folder, dtype="float32")
    check_golden(model, "kimi_linear")


def test_olmo_with_old_norm_names_and_convolutions_cut_in_three_equal_parts(fixture_folder):
    def save_as_transformers_does(tensors):
        result = {}
        for name, array in tensors.items():
            name = name.replace(".input_layernorm", ".attention_layer_norm")
            name = name.replace(".post_attention_layernorm", ".feedforward_layer_norm")
            result[name] = array
        for name in [name for name in tensors if name.endswith("q_conv1d.weight")]:
            places = [name.replace("q_conv1d", f"{x}_conv1d") for x in "qkv"]
            joined = mx.concatenate([tensors[place] for place in places])
            result |= dict(zip(places, mx.split(joined, 3)))
        return result

    folder = rewrite(fixture_folder("olmo_hybrid"), save_as_transformers_does)
    model, _ = load_model(folder, dtype="float32")
    check_golden(model, "olmo_hybrid")


def test_ling_output_projections_saved_under_the_attention_layers_name(fixture_folder):
    folder = fixture_folder("bailing_hybrid_v3")
    old, new = ".attention.o_proj.", ".attention.dense."
    rewrite(folder, lambda tensors: {name.replace(old, new): array for name, array in tensors.items()})
    model, _ = load_model(folder, dtype="float32")
    check_golden(model, "bailing_hybrid_v3")


def test_the_layer_after_the_last_is_dropped_and_one_inside_is_not(fixture_folder):
    def misspell(tensors):
        return {
            name.replace("layers.1.attention.b_proj", "layers.1.attention.x_proj"): a for name, a in tensors.items()
        }

    folder = fixture_folder("bailing_hybrid_v3")
    load_model(folder)
    with pytest.raises(CheckpointError, match=r"layers\.1\.attention\.b_proj"):
        load_model(rewrite(folder, misspell))


def test_olmo_rotates_where_the_config_has_a_theta(fixture_folder):
    folder = edit_config(fixture_folder("olmo_hybrid"), rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    ours, _ = load_model(folder, dtype="float32")
    theirs = stock.stock_model(folder)
    assert stock.difference(ours, theirs, "olmo_hybrid") <= tolerance("olmo_hybrid")
    want = golden("olmo_hybrid")
    assert largest_difference(ours(want["input_ids"]), want["logits_prefill"]) > 1e-2


def test_beta_reaches_2_only_where_negative_eigenvalues_are_allowed(fixture_folder):
    folder = edit_config(fixture_folder("olmo_hybrid"), linear_allow_neg_eigval=False)
    ours, _ = load_model(folder, dtype="float32")
    theirs = stock.stock_model(folder)
    assert stock.difference(ours, theirs, "olmo_hybrid") <= tolerance("olmo_hybrid")


@pytest.mark.parametrize("key", ["expert_swiglu_limit_list", "share_expert_swiglu_limit_list"])
def test_ling_limits_of_the_experts_are_honoured(key, fixture_folder):
    want = golden("bailing_hybrid_v3")
    folder = fixture_folder("bailing_hybrid_v3")
    model, _ = load_model(edit_config(folder, **{key: [0, None, 0, 1e4]}), dtype="float32")
    assert_close(model(want["input_ids"]), want["logits_prefill"], 1e-4, "a limit that nothing reaches")
    model, _ = load_model(edit_config(folder, **{key: [0, 0, 0, 0.05]}), dtype="float32")
    assert largest_difference(model(want["input_ids"]), want["logits_prefill"]) > 1e-2


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("kimi_linear", {"mla_use_nope": False}),
        ("kimi_linear", {"linear_attn_config": None}),
        ("kimi_linear", {"linear_attn_config": 4}),
        ("kimi_linear", {"moe_router_activation_func": "tanh"}),
        ("kimi_linear", {"hidden_act": "situ"}),
        ("kimi_linear", {"attn_res_block_size": 12}),
        ("kimi_linear", {"mla_use_output_gate": True}),
        ("kimi_k3", {"hidden_act": "silu"}),
        ("kimi_k3", {"attn_res_block_size": None}),
        ("bailing_hybrid_v3", {"rope_interleave": False}),
        ("bailing_hybrid_v3", {"no_kda_lora": False}),
        ("bailing_hybrid_v3", {"gated_attention_proj_granularity_type": "element_wise"}),
        ("bailing_hybrid_v3", {"score_function": "softmax"}),
        ("bailing_hybrid_v3", {"use_mla_nope": True}),
        ("bailing_hybrid_v3", {"layer_group_size": 3}),
        ("bailing_hybrid_v3", {"rope_scaling": {"type": "yarn", "factor": 4.0}}),
        ("olmo_hybrid", {"hidden_act": "gelu"}),
        ("olmo_hybrid", {"layer_types": ["linear_attention"] * 3 + ["sliding_attention"]}),
    ],
)
def test_a_switch_that_no_code_honours_is_an_error(name, changes, fixture_folder):
    folder = edit_config(fixture_folder(name), **changes)
    key = next(iter(changes))
    with pytest.raises(CheckpointError, match=key.replace("rope_scaling", "rope_type")):
        load_model(folder)


@pytest.mark.parametrize("lists", [([1, 2], [4]), ([1, 2, 3, 4], [4]), ([0, 1, 2], [3])])
def test_kimi_layer_lists_count_from_1_and_name_each_layer_once(lists, fixture_folder):
    folder = fixture_folder("kimi_linear")
    linear = json.loads((folder / "config.json").read_text())["linear_attn_config"]
    linear |= {"kda_layers": lists[0], "full_attn_layers": lists[1]}
    with pytest.raises(CheckpointError, match="kda_layers"):
        load_model(edit_config(folder, linear_attn_config=linear))


def test_architectures_decide_where_a_model_type_is_shared():
    config = {"model_type": "bailing_hybrid", "architectures": ["BailingMoeV3ForCausalLM"]}
    assert arch.family(config).__name__.endswith("bailing_v3")
    with pytest.raises(UnsupportedModelError, match=r"BailingMoeV9.*BailingMoeV3ForCausalLM"):
        arch.family(config | {"architectures": ["BailingMoeV9ForCausalLM"]})
    with pytest.raises(UnsupportedModelError, match="names none"):
        arch.family({"model_type": "bailing_hybrid"})
