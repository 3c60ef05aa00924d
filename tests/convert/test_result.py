"""A converted model computes what its source computes, here and in stock mlx_lm, and converting it again changes nothing."""

import json
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from helpers import (
    FIXTURES,
    assert_close,
    check_golden,
    golden,
    model_bytes,
    needs_mlx_lm,
    stock_load,
    stored,
    tolerance,
)
from seeded_fixtures import write_safetensors

from mlx_linattn.convert import convert as convert_and_verify
from mlx_linattn.convert import prepare
from mlx_linattn.loading import load_model

convert = partial(convert_and_verify, verify=False)

FAMILIES = sorted(folder.name for folder in FIXTURES.iterdir() if (folder / "tensors.json").exists())
QWEN = [name for name in FAMILIES if name.startswith("qwen3")]
TEXT = {"qwen3_5_untied_text": "qwen3_5", "qwen3_5_moe_split_text": "qwen3_5_moe"}
# Stock mlx_lm knows these, but computes something else than their reference implementation.
WRONG_IN_STOCK = {"jamba", "recurrent_gemma"}


@pytest.fixture
def converted(fixture_folder, tmp_path):
    """Converts a fixture and returns the result's folder."""

    def make(name, **options):
        target = tmp_path / f"{name}-mlx"
        convert(fixture_folder(name), target, **options)
        return target

    return make


def check_equal_in_stock(folder, name, within):
    ids = mx.array(golden(name)["input_ids"])
    ours, _ = load_model(folder)
    stock, _ = stock_load(folder)
    assert_close(ours(ids), np.array(stock(ids).astype(mx.float32)), within, "ours against stock mlx_lm")


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_the_references_after_conversion(name, fixture_folder, tmp_path):
    conversion = prepare(fixture_folder(name), tmp_path / "out", dtype="float32")
    checked = conversion.write()
    assert checked.quality.mean_kl < 1e-9 and checked.quality.top_1_agreement == 1.0
    model, config = load_model(tmp_path / "out")
    check_golden(model, name)
    if name in QWEN:
        assert config["model_type"] == TEXT.get(name, name.rsplit("_fp8")[0].rsplit("_nvfp4")[0])
        assert "model_file" not in config
    if name not in WRONG_IN_STOCK:
        check_equal_in_stock(tmp_path / "out", name, tolerance(name))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", QWEN)
def test_quantized_logits_are_stock_mlx_lms(name, bits, converted):
    folder = converted(name, dtype="float32", quantize=True, q_bits=bits, q_group_size=32)
    check_equal_in_stock(folder, name, 1e-4)


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])
def test_other_modes_are_stock_mlx_lms(name, mode, converted, monkeypatch):
    folder = converted(name, dtype="float32", quantize=True, q_mode=mode)
    # MLX dequantizes embeddings of these modes to bfloat16, which would hide what we compare.
    embed = nn.QuantizedEmbedding.__call__
    monkeypatch.setattr(nn.QuantizedEmbedding, "__call__", lambda self, x: embed(self, x).astype(mx.float32))
    check_equal_in_stock(folder, name, 1e-4)


def test_bfloat16_stays_bfloat16_in_stock_mlx_lm(converted):
    """One float32 norm would make stock mlx_lm compute everything in float32; decays may be float32."""
    folder = converted("qwen3_5", dtype="bfloat16")
    stock, config = stock_load(folder)
    assert stock(mx.array([[1, 2, 3]])).dtype == mx.bfloat16
    assert config["text_config"]["dtype"] == "bfloat16"
    dtypes = {name: dtype for name, (dtype, _) in stored(folder).items()}
    wide = {name for name, dtype in dtypes.items() if dtype == "F32"}
    assert wide == {name for name in dtypes if name.endswith(("A_log", "dt_bias"))}


@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_next", "qwen3_5_fp8"])
@pytest.mark.parametrize("options", [{}, {"quantize": True, "q_group_size": 32}])
def test_converting_a_conversion_changes_no_byte(name, options, converted, tmp_path):
    first = converted(name, **options)
    convert(first, tmp_path / "again")
    convert(first, tmp_path / "requantized", **options)
    assert model_bytes(tmp_path / "again") == model_bytes(first)
    assert model_bytes(tmp_path / "requantized") == model_bytes(first)


def test_requantizing_rounds_what_is_stored(converted, tmp_path):
    eight = converted("qwen3_5", dtype="float32", quantize=True, q_bits=8, q_group_size=32)
    convert(eight, tmp_path / "four", quantize=True, q_bits=4, q_group_size=32)
    a, b = (mx.load(str(folder / "model.safetensors")) for folder in (eight, tmp_path / "four"))
    name = "language_model.model.layers.0.mlp.up_proj"
    numbers = mx.dequantize(*(a[f"{name}.{part}"] for part in ("weight", "scales", "biases")), group_size=32, bits=8)
    for part, want in zip(("weight", "scales", "biases"), mx.quantize(numbers, group_size=32, bits=4)):
        assert mx.array_equal(b[f"{name}.{part}"], want)
    router_like = "language_model.model.layers.0.linear_attn.in_proj_a.weight"  # stays at 8 bits
    assert mx.array_equal(a[router_like], b[router_like])


def test_more_bits_than_are_stored_are_not_made_up(converted, tmp_path):
    four = converted("qwen3_5", quantize=True, q_bits=4, q_group_size=32)
    done = convert(four, tmp_path / "eight", quantize=True, q_bits=8, q_group_size=32)
    assert model_bytes(tmp_path / "eight") == model_bytes(four)
    assert any("bring nothing back" in entry.reason for entry in done.plan.entries)


def test_norms_are_shifted_once_and_metadata_says_so(converted, fixture_folder, tmp_path):
    source = fixture_folder("qwen3_5")
    convert(source, tmp_path / "one")
    convert(tmp_path / "one", tmp_path / "two")
    raw = stored(source)["model.language_model.norm.weight"][1].view(np.float32)
    for folder in (tmp_path / "one", tmp_path / "two"):
        got = stored(folder)["language_model.model.norm.weight"][1].view(np.float32)
        assert np.array_equal(got, raw + np.float32(1))
        header = (folder / "model.safetensors").read_bytes()
        text = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])["__metadata__"]
        assert text["format"] == "mlx"
        made = json.loads(text["mlx_linattn"])["made"]
        assert made["language_model.model.norm.weight"] == "add 1.0"
        assert made["language_model.model.layers.0.linear_attn.conv1d.weight"] == "move_axis 2 1"


def test_a_stock_conversion_is_copied_as_it_is(converted, tmp_path):
    """What mlx_lm itself quantized, router overrides included, goes through unchanged and loads here."""
    from mlx.utils import tree_flatten

    from mlx_linattn.interop.door import mlx_lm

    plain = converted("qwen3_5_moe", dtype="float32")
    utils = mlx_lm("utils")
    model, config = utils.load_model(plain)
    model, config = utils.quantize_model(model, config, group_size=64, bits=4)
    folder = tmp_path / "stock"
    utils.save_model(folder, model)
    utils.save_config(config, folder / "config.json")
    assert any(name.endswith("mlp.gate.scales") for name, _ in tree_flatten(model.parameters()))
    convert(folder, tmp_path / "copy")
    assert {name: data.tobytes() for name, (_, data) in stored(tmp_path / "copy").items()} == {
        name: data.tobytes() for name, (_, data) in stored(folder).items()
    }
    check_equal_in_stock(tmp_path / "copy", "qwen3_5_moe", 1e-4)


def test_mtp_is_kept_byte_for_byte(fixture_folder, converted, tmp_path):
    source = fixture_folder("qwen3_5_moe_fp8")
    convert(source, tmp_path / "kept", keep_mtp=True, quantize=True, q_group_size=32)
    mtp = {name: one for name, one in stored(source).items() if name.startswith("mtp.")}
    got = stored(tmp_path / "kept", "mtp.safetensors")
    assert got.keys() == mtp.keys() and len(mtp) > 20
    for name, (dtype, data) in mtp.items():
        assert got[name][0] == dtype and got[name][1].tobytes() == data.tobytes(), name
    stock_load(tmp_path / "kept")  # does not stumble over the side file
    convert(tmp_path / "kept", tmp_path / "again", keep_mtp=True)
    assert model_bytes(tmp_path / "again") == model_bytes(tmp_path / "kept")


def test_shards_and_index(fixture_folder, tmp_path):
    source = fixture_folder("qwen3_5_moe")
    convert(source, tmp_path / "whole", dtype="float32")
    convert(source, tmp_path / "parts", dtype="float32", shard_size=100_000)
    files = sorted(file.name for file in (tmp_path / "parts").glob("model*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    whole = stored(tmp_path / "whole")
    assert index["weight_map"].keys() == whole.keys()
    assert index["metadata"]["total_size"] == sum(data.nbytes for _, data in whole.values())
    for name, (dtype, data) in whole.items():
        other = stored(tmp_path / "parts", index["weight_map"][name])[name]
        assert other[0] == dtype and other[1].tobytes() == data.tobytes()
    check_equal_in_stock(tmp_path / "parts", "qwen3_5_moe", 1e-4)


def test_shards_of_a_source_may_be_many(fixture_folder, tmp_path):
    convert(fixture_folder("qwen3_next", shards=3), tmp_path / "out", dtype="float32")
    model, _ = load_model(tmp_path / "out")
    check_golden(model, "qwen3_next")


def test_float16_is_what_was_asked(converted):
    folder = converted("qwen3_5_untied_text", dtype="float16")
    assert {dtype for dtype, _ in stored(folder).values()} == {"F16", "F32"}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float16"


def test_dequantized_numbers_are_the_quantized_ones(converted, tmp_path):
    four = converted("qwen3_5_moe", dtype="float32", quantize=True, q_bits=4, q_group_size=32)
    convert(four, tmp_path / "numbers", dequantize=True)
    config = json.loads((tmp_path / "numbers" / "config.json").read_text())
    assert "quantization" not in config and "quantization_config" not in config
    ids = mx.array(golden("qwen3_5_moe")["input_ids"])
    assert_close(load_model(tmp_path / "numbers")[0](ids), np.array(load_model(four)[0](ids)), 1e-4)


@needs_mlx_lm(0, 32)
@pytest.mark.parametrize("name", ["fla_gla", "minimax_hf"])
def test_a_type_unknown_to_stock_brings_its_model_along(name, converted):
    from mlx_linattn.generation import generate_step
    from mlx_linattn.interop.door import mlx_lm

    folder = converted(name, dtype="float32", quantize=True, q_bits=6, q_group_size=32)
    with pytest.raises(ValueError, match="trust_remote_code"):
        mlx_lm("utils").load_model(folder)
    check_equal_in_stock(folder, name, 1e-4)
    prompt = mx.array(golden(name)["input_ids"][0])
    theirs = mlx_lm("generate").generate_step(prompt, stock_load(folder)[0], max_tokens=8)
    ours = generate_step(prompt, load_model(folder)[0], max_tokens=8)
    assert [int(token) for token, _ in theirs] == [int(token) for token, _ in ours]


@pytest.mark.parametrize(
    ("kinds", "interval"),
    [
        (["linear_attention", "full_attention", "linear_attention"], 2),
        (["full_attention", *["linear_attention"] * 2], None),
    ],
)
def test_layer_types_are_told_to_stock_as_an_interval_or_by_a_model_file(kinds, interval, fixture_folder, tmp_path):
    source = fixture_folder("qwen3_5_untied_text")
    config = json.loads((source / "config.json").read_text()) | {"layer_types": kinds}
    config.pop("full_attention_interval")
    (source / "config.json").write_text(json.dumps(config))
    tensors = stored(source)
    for i, kind in enumerate(kinds):  # weights of the kind that the config asks for
        donor = 2 if kind == "full_attention" else 0
        parts = {
            n.replace(f"layers.{donor}.", f"layers.{i}."): t
            for n, t in stored(source).items()
            if f"layers.{donor}." in n
        }
        tensors = {n: t for n, t in tensors.items() if f"layers.{i}." not in n} | parts
    write_safetensors(source / "model.safetensors", tensors)
    convert(source, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written.get("full_attention_interval") == interval and ("model_file" in written) == (interval is None)
    check_equal_in_stock(tmp_path / "out", "qwen3_5_untied_text", 1e-4)
