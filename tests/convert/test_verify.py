"""Verification measures what it says, and finds what is wrong."""

import json
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from helpers import stored
from seeded_fixtures import write_safetensors

from mlx_linattn.convert import convert, prepare, reader, verify
from mlx_linattn.convert.audit import largest_error
from mlx_linattn.convert.bits import AFFINE_BITS, MODES, Quantization
from mlx_linattn.convert.quality import compare, rows_of
from mlx_linattn.convert.reader import Reader
from mlx_linattn.convert.tensors import dequantize
from mlx_linattn.errors import ConvertError, RequestError
from mlx_linattn.loading import load_model
from mlx_linattn.weights.checkpoint import Checkpoint

NAME = "qwen3_5_moe"


def quantized(source, target, **options):
    return prepare(source, target, quantize=True, q_group_size=32, **options).write()


@pytest.mark.parametrize("rows", [88, 7])
def test_quality_is_that_of_the_whole_models(rows, fixture_folder, tmp_path, monkeypatch):
    """Layer beside layer gives what two models loaded whole give, computed here in float64, however the vocabulary is cut."""
    source = fixture_folder(NAME)
    hidden = Reader(Checkpoint(source)).spec.hidden_size
    monkeypatch.setattr(reader, "PIECE", 4 * hidden * rows)
    convert(source, tmp_path / "out", quantize=True, q_group_size=32, verify=False)
    ids = mx.random.randint(0, 88, (3, 40), key=mx.random.key(3))
    got = compare(Checkpoint(source), Checkpoint(tmp_path / "out"), ids)
    logits = [
        np.array(load_model(folder, dtype="float32")[0](ids), np.float64) for folder in (source, tmp_path / "out")
    ]
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in logits)
    kl = (np.exp(p) * (p - q)).sum(-1)
    assert got.tokens == 120 and got.mean_kl > 1e-3
    assert np.isclose(got.mean_kl, kl.mean(), rtol=1e-3)
    assert np.isclose(got.max_kl, kl.max(), rtol=1e-3)
    assert np.isclose(got.kl_95, np.sort(kl.ravel())[113], rtol=1e-3)
    assert np.isclose(got.top_1_agreement, (p.argmax(-1) == q.argmax(-1)).mean())
    for perplexity, x in ((got.source_perplexity, p), (got.perplexity, q)):
        losses = -np.take_along_axis(x[:, :-1], np.array(ids)[:, 1:, None], -1)
        assert np.isclose(perplexity, np.exp(losses.mean()), rtol=1e-3)


def test_more_bits_lose_less(fixture_folder, tmp_path):
    source = fixture_folder(NAME)
    found = [quantized(source, tmp_path / str(bits), q_bits=bits) for bits in (8, 4, 2)]
    kls = [one.quality.mean_kl for one in found]
    assert kls == sorted(kls) and kls[0] < 0.01 < kls[2]
    worst = [one.losses[0].relative_error for one in found]
    assert worst == sorted(worst) and worst[0] < 0.01 and worst[2] > 0.2
    layers = list(found[1].quality.layer_errors)
    assert layers == ["0 (GatedDelta)", "1 (GatedDelta)", "2 (Attention)"]


def test_the_worst_layer_is_the_one_that_was_spoiled(fixture_folder, tmp_path):
    checked = prepare(fixture_folder(NAME), tmp_path / "out", rules=[r"layers\.1\..*switch_mlp=2,g=32"]).write()
    assert checked.worst_layers()[0][0] == "1 (GatedDelta)"
    errors = checked.quality.layer_errors
    assert errors["0 (GatedDelta)"] < 0.01 * errors["1 (GatedDelta)"]


@pytest.mark.parametrize(
    "part", ["embed_tokens.weight", "mlp.gate.scales", "layers.2.self_attn.o_proj.weight", "A_log"]
)
def test_a_changed_result_is_found(part, fixture_folder, tmp_path):
    conversion = prepare(fixture_folder(NAME), tmp_path / "out", quantize=True, q_group_size=32)
    conversion.write(verify=False)
    tensors = {name: (dtype, array.copy()) for name, (dtype, array) in stored(tmp_path / "out").items()}
    name = next(name for name in tensors if name.endswith(part))
    tensors[name][1].view(np.uint32).flat[0] ^= 7 << 28
    write_safetensors(tmp_path / "out" / "model.safetensors", tensors)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    checked = (conversion.plan, conversion.tensors, tmp_path / "out", config, verify.Check())
    with pytest.raises(ConvertError, match=r"does not hold what was read from the source"):
        verify.verify(*checked)


EVERY_KIND = [("affine", bits) for bits in AFFINE_BITS] + [
    (mode, bits) for mode, (_, bits) in MODES.items() if mode != "affine"
]


@pytest.mark.parametrize(("mode", "bits"), EVERY_KIND)
def test_errors_of_quantization_stay_within_the_bound(mode, bits):
    q = Quantization.make(bits, None, mode)
    for seed, (shift, scale) in enumerate([(0, 1), (5, 1), (0, 1e-3), (-3, 0.1)]):
        for dtype in (mx.float32, mx.bfloat16):
            weight = shift + scale * mx.random.normal((64, 256), key=mx.random.key(seed))
            weight = (weight * mx.exp(mx.random.normal((64, 1), key=mx.random.key(9)))).astype(dtype)
            got = dequantize(list(mx.quantize(weight, q.group_size, q.bits, mode=q.mode)), q).astype(mx.float32)
            weight = weight.astype(mx.float32)
            error = mx.abs(got - weight).reshape(64, -1, q.group_size).max(-1)
            assert (error <= largest_error(q, weight)).all()


def test_max_kl_is_a_gate(fixture_folder, tmp_path):
    source = fixture_folder(NAME)
    with pytest.raises(ConvertError, match=r"mean KL divergence from the source is .*, allowed is 1e-06"):
        convert(source, tmp_path / "out", quantize=True, q_bits=2, q_group_size=32, max_kl=1e-6)
    assert not (tmp_path / "out").exists()
    convert(source, tmp_path / "out", quantize=True, q_bits=8, q_group_size=32, max_kl=0.1)
    load_model(tmp_path / "out")


def test_a_layer_too_large_for_memory_is_told_not_run(fixture_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "working_set", lambda: 1000)
    checked = quantized(fixture_folder(NAME), tmp_path / "out")
    assert (
        checked.quality is None and "that takes" in checked.text and "1.00 kB" in checked.text and checked.tensors > 40
    )
    with pytest.raises(ConvertError, match="was not measured"):
        convert(fixture_folder(NAME), tmp_path / "other", max_kl=1.0)


def test_calibration_text_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "TEXT", verify.TEXT[:300])
    (tmp_path / "mine.txt").write_text("My dog is called Pepper. What is my dog's name?\n" * 3)
    with pytest.raises(RequestError, match="no such file"):
        convert("demo", tmp_path / "out", calibration=tmp_path / "none.txt")
    with pytest.raises(RequestError, match="nothing is to be verified"):
        convert("demo", tmp_path / "out", calibration=tmp_path / "mine.txt", verify=False)
    checked = prepare("demo", tmp_path / "out").write(calibration=tmp_path / "mine.txt")
    assert checked.text == "mine.txt and bundled text" and 100 < checked.quality.tokens <= 256
    assert checked.quality.mean_kl < 1e-3  # bfloat16 in both; norms were rounded


def test_report_and_card_say_what_was_done(fixture_folder, tmp_path):
    words = [
        "convert",
        str(fixture_folder(NAME)),
        "-o",
        str(tmp_path / "out"),
        "-q",
        "--q-group-size",
        "32",
        "--keep-mtp",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "mlx_linattn.cli", *words], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and "tensors are what they were made from" in done.stderr, done.stderr
    report = json.loads((tmp_path / "out" / "conversion_report.json").read_text())
    plan = prepare(fixture_folder(NAME), tmp_path, quantize=True, q_group_size=32, keep_mtp=True).plan
    assert report["command"] == " ".join(["mlx-linattn", *words])
    assert report["bytes"] == plan.nbytes and report["dropped"] == plan.dropped
    assert set(report["kept_unchanged"]) == set(plan.mtp)
    assert report["versions"]["mlx"] == mx.__version__
    assert report["verification"]["tensors_checked"] == len(plan.entries)
    assert report["verification"]["quality"]["mean_kl"] > 0
    assert sum(group["parameters"] for group in report["tensors"]) == plan.parameters
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: mlx\n") and " ".join(words) in card and "KL divergence, mean" in card


def test_force_replaces_a_model_and_nothing_else(fixture_folder, tmp_path):
    source, target = fixture_folder(NAME), tmp_path / "out"
    convert(source, target, verify=False)
    convert(source, target, verify=False, force=True, quantize=True, q_group_size=32)
    assert "quantization" in json.loads((target / "config.json").read_text())
    assert sorted(file.name for file in tmp_path.glob("out*")) == ["out"]
    with pytest.raises(ConvertError, match="the source itself"):
        convert(source, source, verify=False, force=True)
    (target / "config.json").unlink()
    with pytest.raises(ConvertError, match="not an empty folder"):
        convert(source, target, verify=False, force=True)


def test_rows_have_no_padding():
    assert rows_of(list(range(10))).shape == (1, 10)
    assert rows_of(list(range(600))).shape == (2, 256)
    assert rows_of(list(range(9000))).shape == (16, 256)
