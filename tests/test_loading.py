"""Loading: from a folder or the Hub's cache, in any layout; what is wrong with a checkpoint is said in one sentence."""

import json
import struct

import mlx.core as mx
import numpy as np
import pytest
from helpers import FIXTURES, assert_close, check_golden, golden, materialize

import mlx_linattn as la
from mlx_linattn.errors import CheckpointError, LinAttnError, RequestError, TokenizerError, UnsupportedModelError
from mlx_linattn.loading import resolve

DENSE = "qwen3_5_untied_text"


@pytest.fixture
def folder(fixture_folder):
    return fixture_folder(DENSE)


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def rewrite(folder, change):
    file = folder / "model.safetensors"
    arrays = dict(mx.load(str(file)))
    mx.eval(arrays)
    change(arrays)
    mx.save_safetensors(str(file), arrays, {"format": "pt"})


def complaint(folder, kind=CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        la.load_model(folder)
    text = str(caught.value)
    assert text and "\n" not in text
    return text


def test_a_sharded_checkpoint_loads_as_one(tmp_path):
    folder = materialize(FIXTURES / "qwen3_next", tmp_path / "sharded", shards=3)
    assert len(list(folder.glob("model-*.safetensors"))) == 3
    model, _ = la.load_model(folder)
    check_golden(model, "qwen3_next")


def test_weights_can_stay_on_disk_until_they_are_used(folder):
    model, _ = la.load_model(folder, lazy=True)
    want = golden(DENSE)
    assert_close(model(want["input_ids"]), want["logits_prefill"], 1e-4)


def test_memory_while_loading_peaks_near_the_weights_size(fixture_folder):
    folder = fixture_folder("qwen3_5_moe_split_text")
    size = (folder / "model.safetensors").stat().st_size
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    model, _ = la.load_model(folder)
    assert mx.get_active_memory() - before <= size * 1.1
    assert mx.get_peak_memory() - before <= size * 1.5
    del model


def test_dtype_casts_all_but_what_must_stay_float32(folder):
    from mlx.utils import tree_flatten

    model, _ = la.load_model(folder, dtype="bfloat16")
    kinds = {name: array.dtype for name, array in tree_flatten(model.parameters())}
    assert kinds["layers.0.mixer.in_proj_qkv.weight"] == mx.bfloat16
    for name in ("layers.0.mixer.A_log", "layers.0.mixer.dt_bias", "layers.0.mixer_norm.weight", "norm.weight"):
        assert kinds[name] == mx.float32, name


def test_zero_centred_norms_keep_every_bit(fixture_folder):
    """1 + w of a bfloat16 w, in float32: a sum in bfloat16 would lose its last eight bits."""
    folder = fixture_folder("qwen3_5_fp8")
    stored = mx.load(str(folder / "model.safetensors"))["model.language_model.layers.0.input_layernorm.weight"]
    model, _ = la.load_model(folder)
    exact = np.array(stored.astype(mx.float32)) + np.float32(1)
    np.testing.assert_array_equal(np.array(model.layers[0].mixer_norm.weight), exact)


def test_unknown_model_type_names_the_nearest(folder):
    edit_config(folder, model_type="qwen3_6")
    text = complaint(folder, UnsupportedModelError)
    assert "qwen3_6" in text and "'qwen3_5'" in text


def test_a_missing_shard_is_named(tmp_path):
    folder = materialize(FIXTURES / "qwen3_next", tmp_path / "sharded", shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors is missing" in complaint(folder)


def test_a_truncated_shard_is_named(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "model.safetensors: cut off" in complaint(folder)


@pytest.mark.parametrize("length", [0, 7, 60])
def test_a_file_cut_inside_its_header_is_named(folder, length):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    assert "model.safetensors" in complaint(folder)


def test_a_corrupted_header_is_named(folder):
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[20:30] = b"\xff" * 10
    file.write_bytes(data)
    assert "header is damaged" in complaint(folder)


@pytest.mark.parametrize("length", [2**63, 10**9])
def test_an_absurd_header_length_is_refused_before_it_is_allocated(folder, length):
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", length) + file.read_bytes()[8:])
    assert "not a safetensors file" in complaint(folder)


def test_a_tensor_that_no_rule_uses_is_named(folder):
    rewrite(folder, lambda arrays: arrays.update({"model.layers.0.linear_attn.surprise": mx.zeros((3,))}))
    assert "model.layers.0.linear_attn.surprise" in complaint(folder)


def test_a_missing_tensor_is_named(folder):
    rewrite(folder, lambda arrays: arrays.pop("model.layers.0.linear_attn.A_log"))
    assert "'model.layers.0.linear_attn.A_log' is missing" in complaint(folder)


def test_a_shape_that_contradicts_the_config_is_named(folder):
    edit_config(folder, intermediate_size=100)
    text = complaint(folder)
    assert "mlp" in text and "[96, 64]" in text and "[100, 64]" in text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("attn_output_gate", False),
        ("layer_types", ["linear_attention", "window", "full_attention"]),
    ],
)
def test_an_unknown_value_of_a_known_switch_is_an_error(folder, key, value):
    edit_config(folder, **{key: value})
    assert key in complaint(folder)


def test_scaled_rope_is_refused_rather_than_ignored(folder):
    edit_config(folder, rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e7})
    assert "yarn" in complaint(folder)


def test_a_missing_config_key_is_named(folder):
    edit_config(folder, linear_num_key_heads=...)
    assert "linear_num_key_heads" in complaint(folder)


def test_pickles_are_refused_with_the_reason(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pickle" in complaint(folder)


def test_an_index_cannot_lead_out_of_the_folder(folder):
    index = {"weight_map": {"model.norm.weight": "../elsewhere/model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "not a file of this folder" in complaint(folder)


def test_a_config_that_is_not_json_is_named(folder):
    (folder / "config.json").write_text("{")
    assert "config.json" in complaint(folder)


@pytest.mark.parametrize("name", ["no/such/folder/here", "./missing", "~missing", "not-an-id", ".."])
def test_what_is_neither_folder_nor_hub_id_is_said(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path / "..")
    with pytest.raises(LinAttnError):
        la.load_model(name)


def test_a_hub_id_that_is_not_cached_says_so_when_offline(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="nobody/nothing"):
        la.load_model("nobody/nothing")


def test_a_cached_hub_model_loads_offline(fixture_folder, monkeypatch, tmp_path):
    """The layout that huggingface_hub's cache has: refs/main names a snapshot."""
    import huggingface_hub.constants

    cache = tmp_path / "hub"
    snapshot = cache / "models--someone--tiny" / "snapshots" / ("a" * 40)
    snapshot.parent.mkdir(parents=True)
    fixture_folder(DENSE).rename(snapshot)
    refs = cache / "models--someone--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text("a" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    assert resolve("someone/tiny").samefile(snapshot)
    model, _ = la.load_model("someone/tiny")
    assert model.model_type == "qwen3_5_text"


def test_a_folder_without_a_tokenizer_still_gives_a_model(folder):
    la.load_model(folder)
    with pytest.raises(TokenizerError, match="has no tokenizer"):
        la.load(folder)


def test_an_unknown_dtype_is_refused(folder):
    with pytest.raises(RequestError, match="int8"):
        la.load_model(folder, dtype="int8")
