"""flash-linear-attention's research models against its own logits, in today's and in earlier files, and their switches."""

import importlib
import json
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from helpers import FIXTURES, assert_close, check_golden, check_precision, golden
from seeded_fixtures import read_safetensors, write_safetensors

from mlx_linattn import ops
from mlx_linattn.arch import fla
from mlx_linattn.convert import convert
from mlx_linattn.errors import CheckpointError, RequestError
from mlx_linattn.layers.linear_attention import LinearAttention
from mlx_linattn.loading import load_model
from mlx_linattn.model import Model
from mlx_linattn.state import WindowState

NAMES = [
    "fla_gated_deltanet",
    "fla_gated_deltanet_hybrid",
    "fla_delta_net",
    "fla_kda",
    "fla_linear_attn",
    "fla_retnet",
    "fla_gla",
    "fla_hgrn2",
]


def config_of(name: str, **changes) -> dict:
    return json.loads((FIXTURES / name / "config.json").read_text()) | changes


def rewrite(folder, change, **config):
    """The checkpoint in ``folder`` after ``change`` of its {name: (dtype, array)} and with other config values."""
    file = folder / "model.safetensors"
    tensors = {name: (dtype, array.copy()) for name, (dtype, array) in read_safetensors(file).items()}
    write_safetensors(file, change(tensors))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_the_references(name, fixture_folder):
    model, _ = load_model(fixture_folder(name), dtype="float32")
    check_golden(model, name)
    with ops.use_backend("reference"):
        check_golden(model, name)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("hybrid")])
def test_errors_of_bfloat16_do_not_grow_over_4096_tokens(name, fixture_folder):
    folder = fixture_folder(name)
    check_precision(*(load_model(folder, dtype=dtype)[0] for dtype in ("bfloat16", "float32")))


@pytest.mark.parametrize("name", NAMES)
def test_gates_are_float32_in_a_bfloat16_model(name, fixture_folder, monkeypatch):
    seen = []

    def spy(*arguments, **options):
        seen.extend(gate for gate in (*arguments[3:5], options.get("decay"), options.get("beta")) if gate is not None)
        return recurrence(*arguments, **options)

    recurrence = ops.recurrence
    for place in ("ops", "ops.delta_mixer", "ops.kernel_attention"):
        monkeypatch.setattr(importlib.import_module(f"mlx_linattn.{place}"), "recurrence", spy)
    model, _ = load_model(fixture_folder(name), dtype="bfloat16")
    model(mx.array([[1, 2, 3]]))
    assert bool(seen) == (name != "fla_linear_attn")  # the one model without any gate
    assert all(gate.dtype == mx.float32 for gate in seen)


def test_retnets_longest_memories_survive_bfloat16(monkeypatch):
    """The last of 8 heads decays by 1 - 2^-12, which is 1 in bfloat16: a state that only grows."""
    seen = []
    recurrence = ops.recurrence
    monkeypatch.setattr(ops, "recurrence", lambda *a, **options: seen.append(a[3]) or recurrence(*a, **options))
    model = Model(fla.spec(config_of("fla_retnet", num_heads=8)))
    model.set_dtype(mx.bfloat16)
    model(mx.array([[1, 2, 3]]))
    assert [decay.tolist() for decay in seen] == 2 * [[1 - 2.0 ** (-5 - head) for head in range(8)]]


@pytest.mark.parametrize("name", ["fla_gla", "fla_gated_deltanet"])
def test_early_files_with_a_fused_gate_projection(name, fixture_folder):
    def fuse(tensors):
        for i in (0, 1):
            gate, up = f"model.layers.{i}.mlp.gate_proj.weight", f"model.layers.{i}.mlp.up_proj.weight"
            dtype, rows = tensors[gate]
            tensors[gate] = (dtype, np.concatenate([rows, tensors.pop(up)[1]]))
            if name == "fla_gated_deltanet":  # that code wrote this too, and never read it
                tensors[f"model.layers.{i}.attn.D"] = ("F32", np.ones(2, np.float32))
        return tensors

    model, _ = load_model(rewrite(fixture_folder(name), fuse), dtype="float32")
    check_golden(model, name)


@pytest.mark.parametrize("name", ["fla_gla", "fla_retnet"])
def test_files_written_without_fused_norms(name, fixture_folder):
    def rename(tensors):
        return {name.replace("g_norm_swish_gate", "g_norm"): value for name, value in tensors.items()}

    model, _ = load_model(rewrite(fixture_folder(name), rename, fuse_norm=False), dtype="float32")
    check_golden(model, name)


@pytest.mark.parametrize("name", NAMES)
def test_converted_folders_load_to_the_same_model(name, fixture_folder, tmp_path):
    folder, ids = fixture_folder(name), golden(name)["input_ids"]
    want = np.array(load_model(folder, dtype="float32")[0](ids))
    convert(folder, tmp_path / "plain")
    assert_close(load_model(tmp_path / "plain")[0](ids), want, 0.0)
    convert(folder, tmp_path / "quantized", quantize=True, q_bits=8, q_group_size=32)
    rounded = np.array(load_model(tmp_path / "quantized")[0](ids))
    assert 0 < np.abs(rounded - want).mean() < 0.1 * want.std()


def test_a_window_of_attention_sees_exactly_its_tokens():
    """Two attention layers with windows of 4 reach back 6 tokens, no more and no less."""
    attn = {"layers": [0, 1], "num_heads": 4, "num_kv_heads": 2, "window_size": 4}
    mx.random.seed(0)
    model = Model(fla.spec(config_of("fla_gated_deltanet_hybrid", attn=attn)))
    assert all(isinstance(layer, WindowState) for layer in model.make_cache())
    ids = np.arange(20)[None]
    whole, cache = model(ids), model.make_cache()
    pieces = [model(ids[:, first : first + size], cache) for first, size in ((0, 7), (7, 1), (8, 12))]
    assert_close(mx.concatenate(pieces, axis=1), np.array(whole), 1e-5)
    for back, changes in ((6, True), (7, False)):
        other = ids.copy()
        other[0, 19 - back] = 80
        assert (mx.abs(model(other)[0, 19] - whole[0, 19]).max().item() > 1e-6) is changes


def test_attention_layers_may_come_in_several_descriptions():
    parts = [{"layers": [1], "num_heads": 4}, {"layers": [0], "num_heads": 2, "window_size": 5, "rope_theta": 5e5}]
    first, second = (layer.mixer for layer in fla.spec(config_of("fla_gated_deltanet", attn=parts)).layers)
    assert (first.heads, first.kv_heads, first.window, first.rope.theta) == (2, 2, 5, 5e5)
    assert (second.heads, second.kv_heads, second.window, second.rope.theta) == (4, 4, None, 1e4)


def test_grouped_heads_equal_the_same_heads_repeated(fixture_folder):
    """A GLA whose two query heads share one key head is the GLA that stores that head twice."""
    folder = fixture_folder("fla_gla")

    def halve(tensors):
        for name, (dtype, rows) in tensors.items():
            if name.split(".attn.")[-1] in ("k_proj.weight", "v_proj.weight", "gk_proj.1.weight", "gk_proj.1.bias"):
                tensors[name] = (dtype, rows[: len(rows) // 2])
        return tensors

    def double(tensors):
        return {
            name: (dtype, np.concatenate([rows, rows])) if rows.shape[0] == shapes[name][0] // 2 else (dtype, rows)
            for name, (dtype, rows) in tensors.items()
        }

    shapes = {name: array.shape for name, (_, array) in read_safetensors(folder / "model.safetensors").items()}
    ids = golden("fla_gla")["input_ids"]
    grouped = load_model(rewrite(folder, halve, num_kv_heads=1), dtype="float32")[0](ids)
    mx.eval(grouped)
    repeated = load_model(rewrite(folder, double, num_kv_heads=2), dtype="float32")[0](ids)
    assert_close(grouped, np.array(repeated), 1e-5)


MAPS = ("elementwise_product", "t2r", "hedgehog", "elu", "relu")


@pytest.mark.parametrize(
    ("feature_map", "normalize"), [*((name, on) for name in MAPS for on in (True, False)), ("exp", True)]
)
def test_kernel_attention_as_a_layer_decodes_what_it_prefills(feature_map, normalize):
    spec = fla.spec(config_of("fla_linear_attn"))
    mixer = replace(spec.layers[0].mixer, feature_map=feature_map, normalize=normalize)
    spec = replace(spec, layers=tuple(replace(layer, mixer=mixer) for layer in spec.layers))
    mx.random.seed(0)
    model = Model(spec)
    ids = np.random.default_rng(0).integers(0, 88, (2, 40))
    whole, cache = model(ids), model.make_cache()
    steps = [model(ids[:, :17], cache), *(model(ids[:, t : t + 1], cache) for t in range(17, 40))]
    assert_close(mx.concatenate(steps, axis=1), np.array(whole), 2e-5, "decode")
    padded = model(ids, lengths=[40, 11])
    assert_close(padded[1, :11], np.array(whole[1, :11]), 2e-5, "padded")


@pytest.mark.parametrize("words", [{"normalize": True, "decay": (0.9, 0.9)}, {"feature_map": "exp"}])
def test_words_of_a_layer_that_contradict_each_other_are_refused(words):
    mixer = fla.spec(config_of("fla_linear_attn")).layers[0].mixer
    with pytest.raises(RequestError, match="normalize"):
        LinearAttention(replace(mixer, **words), 64)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("fla_gated_deltanet", "use_short_conv", False),
        ("fla_gated_deltanet", "use_mamba_gate", False),
        ("fla_gated_deltanet", "output_gate_activation", "gelu"),
        ("fla_gated_deltanet", "attnres_block_size", 4),
        ("fla_gated_deltanet", "hidden_act", "powlu"),
        ("fla_delta_net", "qk_norm", "sum"),
        ("fla_delta_net", "qk_activation", "elu"),
        ("fla_delta_net", "use_beta", False),
        ("fla_kda", "use_short_conv", False),
        ("fla_linear_attn", "feature_map", "dpfp"),
        ("fla_linear_attn", "norm_q", True),
        ("fla_linear_attn", "tie_feature_map_qk", True),
        ("fla_retnet", "feature_map", "relu"),
        ("fla_retnet", "use_short_conv", True),
        ("fla_gla", "use_gv", True),
        ("fla_gla", "elementwise_affine", False),
        ("fla_gla", "expand_k", 0.51),
        ("fla_hgrn2", "use_short_conv", True),
    ],
)
def test_switches_that_no_code_honours_are_refused(name, key, value):
    with pytest.raises(CheckpointError, match=key):
        fla.spec(config_of(name, **{key: value}))


def test_switches_that_change_the_spec():
    def mixer(name, **changes):
        return fla.spec(config_of(name, **changes)).layers[0].mixer

    assert mixer("fla_gated_deltanet", allow_neg_eigval=True).beta_scale == 2.0
    assert mixer("fla_gated_deltanet", use_gate=False).output_gate is None
    assert mixer("fla_gated_deltanet", output_gate_activation="sigmoid").output_gate == "sigmoid"
    assert mixer("fla_delta_net", use_gate=True).output_gate == "silu"
    assert mixer("fla_kda", lower_bound=-5).lower_bound == -5
    assert mixer("fla_gla", clamp_min=-0.5).decay.log_minimum == -0.5
    assert mixer("fla_gla", use_output_gate=False).output_gate is None
    assert mixer("fla_hgrn2", use_lower_bound=False).decay.bounded is False
    assert mixer("fla_linear_attn", norm_feature_map=True, feature_map="elu").normalize is True
