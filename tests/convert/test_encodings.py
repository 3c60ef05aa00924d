"""Published number formats: each decodes to the numbers that its definition gives, and a part too few or too many is an error."""

import json
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from helpers import assert_close, golden, stock_load, stored
from seeded_fixtures import E4M3, from_f8_e4m3, to_bf16, to_f8_e4m3, write_safetensors

from mlx_linattn.convert import convert as convert_and_verify
from mlx_linattn.convert import prepare
from mlx_linattn.errors import CheckpointError
from mlx_linattn.loading import load_model

convert = partial(convert_and_verify, verify=False)

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
NAME = "qwen3_5_moe_split_text"
PLAIN = ("in_proj_a", "in_proj_b", "conv1d", "norm", "embed_tokens", "lm_head", "mlp.gate.", "shared_expert_gate")


def e2m1(x):
    """4-bit codes of numbers, and the numbers that they stand for."""
    code = np.abs(np.abs(x)[..., None] - E2M1).argmin(-1)
    return (code | np.where(x < 0, 8, 0)).astype(np.uint8), np.sign(x) * E2M1[code]


def packed(code):
    return (code[..., ::2] | code[..., 1::2] << 4).astype(np.uint8)


def grouped(x, size):
    return x.reshape(*x.shape[:-1], -1, size)


def modelopt_nvfp4(name, x):
    scale_2 = np.float32(np.abs(x).max() / 6 / 448)
    groups = grouped(x, 16)
    scale = to_f8_e4m3(np.abs(groups).max(-1) / 6 / scale_2)
    step = from_f8_e4m3(scale)[..., None] * scale_2
    code, value = e2m1(groups / step)
    parts = {name: ("U8", packed(code.reshape(x.shape))), f"{name}_scale": ("F8_E4M3", scale)}
    parts |= {f"{name}_scale_2": ("F32", scale_2.reshape(())), name.replace("weight", "input_scale"): ("F32", scale_2)}
    return parts, (value * step).reshape(x.shape)


def mxfp4(name, x):
    groups = grouped(x, 32)
    exponent = np.floor(np.log2(np.abs(groups).max(-1))) - 2
    code, value = e2m1(groups / 2.0 ** exponent[..., None])
    parts = {f"{name}_packed": ("U8", packed(code.reshape(x.shape)))}
    parts[f"{name}_scale"] = ("U8", (exponent + 127).astype(np.uint8))
    return parts, (value * 2.0 ** exponent[..., None]).reshape(x.shape)


def fp8_rows(name, x):
    scale = np.abs(x).max(-1, keepdims=True) / E4M3[-1]
    scale = (to_bf16(scale).astype(np.uint32) << 16).view(np.float32)
    code = to_f8_e4m3(x / scale)
    return {name: ("F8_E4M3", code), f"{name}_scale": ("BF16", to_bf16(scale))}, from_f8_e4m3(code) * scale


def encode(folder, encoder):
    """Rewrites a checkpoint in another number format; returns a float32 twin that holds the numbers it stands for."""
    twin = folder.with_name("twin")
    twin.mkdir()
    config = json.loads((folder / "config.json").read_text())
    (twin / "config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "a published one"}})
    )
    coded, plain = {}, {}
    for name, (dtype, array) in stored(folder).items():
        if array.ndim == 2 and array.shape[-1] % 32 == 0 and not any(word in name for word in PLAIN):
            parts, numbers = encoder(name, array.astype(np.float64))
            coded |= parts
            plain[name] = ("F32", numbers.astype(np.float32))
        else:
            coded[name] = plain[name] = (dtype, array)
    write_safetensors(folder / "model.safetensors", coded)
    write_safetensors(twin / "model.safetensors", plain)
    return twin


@pytest.mark.parametrize("encoder", [modelopt_nvfp4, mxfp4, fp8_rows])
def test_formats_decode_to_what_they_stand_for(encoder, fixture_folder, tmp_path):
    source = fixture_folder(NAME)
    twin = encode(source, encoder)
    convert(source, tmp_path / "out", dtype="float32", dequantize=True)
    convert(twin, tmp_path / "want")
    got, want = (mx.load(str(tmp_path / name / "model.safetensors")) for name in ("out", "want"))
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert_close(got[name], np.array(array), 1e-6, name)
    ids = mx.array(golden(NAME)["input_ids"])
    reference = np.array(load_model(twin)[0](ids))
    assert_close(load_model(source, dtype="float32")[0](ids), reference, 1e-4, "loaded raw")
    assert_close(stock_load(tmp_path / "out")[0](ids), reference, 1e-4, "stock mlx_lm")


def test_mxfp4_goes_over_bit_for_bit(fixture_folder, tmp_path):
    source = fixture_folder(NAME)
    twin = encode(source, mxfp4)
    convert(source, tmp_path / "out", dtype="float32")
    raw, got = stored(source), stored(tmp_path / "out")
    layer = "model.layers.0.mlp."
    for theirs, ours in (
        ("shared_expert.up_proj", "shared_expert.up_proj"),
        ("experts.1.up_proj", "switch_mlp.up_proj"),
    ):
        codes, scales = (got[f"language_model.{layer}{ours}.{part}"][1] for part in ("weight", "scales"))
        if "switch" in ours:
            codes, scales = codes[1], scales[1]
        assert codes.tobytes() == raw[f"{layer}{theirs}.weight_packed"][1].tobytes()
        assert scales.tobytes() == raw[f"{layer}{theirs}.weight_scale"][1].tobytes()
    block = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    assert {key: block[key] for key in ("bits", "group_size", "mode")} == {"bits": 4, "group_size": 32, "mode": "mxfp4"}
    ids = mx.array(golden(NAME)["input_ids"])
    reference = np.array(load_model(twin)[0](ids))
    assert_close(load_model(tmp_path / "out")[0](ids), reference, 1e-4, "ours")
    assert_close(stock_load(tmp_path / "out")[0](ids), reference, 1e-4, "stock mlx_lm")
    plan = prepare(source, tmp_path / "x", quantize=True, q_bits=4, q_group_size=32, recipe="uniform").plan
    assert {str(entry.quantization) for entry in plan.entries if entry.before == "mxfp4"} == {"4-bit g32"}


def orphan_scale(tensors):
    tensors["model.layers.0.mlp.shared_expert.up_proj.weight_scale_inv"] = ("BF16", np.ones((1, 1), np.uint16))


def scale_of_a_plain_weight(tensors):
    tensors["model.layers.0.linear_attn.in_proj_a.weight_scale"] = ("BF16", np.ones((4, 1), np.uint16))


def weight_without_scale(tensors):
    del tensors["model.layers.0.mlp.shared_expert.up_proj.weight_scale"]


def scale_of_another_shape(tensors):
    name = "model.layers.0.mlp.shared_expert.up_proj.weight_scale"
    tensors[name] = (tensors[name][0], tensors[name][1][:-1])


def integer_weight(tensors):
    name = "model.layers.0.mlp.shared_expert.up_proj.weight"
    tensors[name] = ("U8", tensors[name][1])
    del tensors[f"{name}_scale"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (orphan_scale, r"'.*up_proj.weight_scale(_inv)?' is a part of a quantized weight"),
        (scale_of_a_plain_weight, r"'.*in_proj_a.weight_scale' is a part of a quantized weight"),
        (weight_without_scale, r"up_proj.weight' is F8_E4M3, but no scale"),
        (scale_of_another_shape, r"scales do not fit their weight: .*up_proj.weight \[\d+, \d+\]"),
        (integer_weight, r"'.*up_proj.weight' holds uint8 numbers"),
    ],
)
def test_parts_that_do_not_belong_together(change, sentence, fixture_folder, tmp_path):
    source = fixture_folder(NAME)
    encode(source, fp8_rows)
    tensors = dict(stored(source))
    change(tensors)
    write_safetensors(source / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=sentence):
        convert(source, tmp_path / "out")
    with pytest.raises(CheckpointError, match=sentence):
        load_model(source)
