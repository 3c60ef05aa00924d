"""Bad input ends in one sentence that names what is wrong, and loses nothing: not the source, not a half-written target."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from helpers import folder_bytes, model_bytes, stored
from seeded_fixtures import write_safetensors

from mlx_linattn.convert import convert as convert_and_verify
from mlx_linattn.convert import prepare, shards
from mlx_linattn.errors import CheckpointError, ConvertError, RequestError
from mlx_linattn.loading import load_model

convert = partial(convert_and_verify, verify=False)


def command(*arguments, **kwargs):
    """The command line as a user runs it."""
    words = [sys.executable, "-m", "mlx_linattn.cli", "convert", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, **kwargs)


def edit_config(folder, **changes):
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config.update(changes)
    file.write_text(json.dumps(config))


def edit_tensors(folder, change):
    """Rewrite a single-file checkpoint with ``change`` applied to its {name: (dtype, array)}."""
    tensors = {name: (dtype, array.copy()) for name, (dtype, array) in stored(folder).items()}
    change(tensors)
    write_safetensors(folder / "model.safetensors", tensors)


def missing_shard(folder):
    (folder / "model-00002-of-00003.safetensors").unlink()
    return "model-00002-of-00003.safetensors is missing"


def truncated_shard(folder):
    file = folder / "model-00003-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return "cut off"


def cut_in_header(folder):
    file = folder / "model-00001-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:20])
    return "cut off inside its header"


def corrupt_header(folder):
    file = folder / "model-00001-of-00003.safetensors"
    data = bytearray(file.read_bytes())
    data[30:40] = b"\xff" * 10
    file.write_bytes(data)
    return "header is damaged"


def wrong_index(folder):
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["model.layers.0.extra.weight"] = "model-00001-of-00003.safetensors"
    file.write_text(json.dumps(index))
    return "lacks tensor 'model.layers.0.extra.weight'"


def tensor_twice(folder):
    shutil.copy(folder / "model-00001-of-00003.safetensors", folder / "model-00004-of-00003.safetensors")
    return "is in both"


def unknown_switch(folder):
    edit_config(folder, hidden_act="gelu")
    return "hidden_act is 'gelu', but only 'silu' is supported"


def unknown_type(folder):
    edit_config(folder, model_type="qwen3_nxt")
    return "nearest known one is 'qwen3_next'"


def contradicting_config(folder):
    edit_config(folder, linear_num_value_heads=8)
    return "but config.json asks for"


def only_pickles(folder):
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")
    return "a pickle, and pickles can run code"


def broken_config(folder):
    (folder / "config.json").write_text("{")
    return "cannot be read as JSON"


@pytest.mark.parametrize(
    "spoil",
    [
        missing_shard, truncated_shard, cut_in_header, corrupt_header, wrong_index, tensor_twice, unknown_switch,
        unknown_type, contradicting_config, only_pickles, broken_config,
    ],
)  # fmt: skip
def test_a_spoiled_checkpoint_is_one_sentence(spoil, fixture_folder, tmp_path):
    source = fixture_folder("qwen3_next", shards=3)
    sentence = spoil(source)
    with pytest.raises(CheckpointError) as caught:
        convert(source, tmp_path / "out")
    assert sentence in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(CheckpointError):
        load_model(source)
    assert not list(tmp_path.glob("out*"))


def add_unknown(tensors):
    tensors["model.layers.0.mlp.surprise.weight"] = ("F32", np.zeros((2, 2), np.float32))


def remove_one(tensors):
    del tensors["model.layers.1.linear_attn.A_log"]


def misshape_one(tensors):
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = ("F32", tensors[name][1][:, :-1])


def name_twice(tensors):
    tensors["language_model.model.norm.weight"] = tensors["model.norm.weight"]


def put_nan(tensors):
    tensors["model.layers.1.mlp.up_proj.weight"][1][0, 0] = np.nan


def put_infinity(tensors):
    tensors["model.norm.weight"][1][0] = np.inf


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (add_unknown, "'model.layers.0.mlp.surprise.weight' is used by nothing"),
        (remove_one, "'model.layers.1.linear_attn.A_log' is missing"),
        (misshape_one, "'model.layers.0.mlp.up_proj.weight' gives shape"),
        (name_twice, "two names of one tensor"),
        (put_nan, "'model.layers.1.mlp.up_proj.weight' holds NaN or infinite numbers"),
        (put_infinity, "'model.norm.weight' holds NaN or infinite numbers"),
    ],
)
def test_a_wrong_tensor_is_named(change, sentence, fixture_folder, tmp_path):
    source = fixture_folder("qwen3_5_untied_text")
    edit_tensors(source, change)
    with pytest.raises((CheckpointError, ConvertError), match=sentence):
        convert(source, tmp_path / "out", quantize=True, q_group_size=32)
    assert not (tmp_path / "out").exists()


def put_million(tensors):
    tensors["lm_head.weight"][1][0, 0] = 1e6


def test_too_large_for_float16(fixture_folder, tmp_path):
    source = fixture_folder("qwen3_5_untied_text")
    edit_tensors(source, put_million)
    with pytest.raises(ConvertError, match=r"'lm_head.weight' .*too large for float16"):
        convert(source, tmp_path / "out", dtype="float16")


def shrink_a_group(tensors):
    tensors["model.layers.0.linear_attn.in_proj_qkv.weight"][1][3, :16] *= 1e-4


def test_a_group_that_would_become_zero_is_an_error(fixture_folder, tmp_path):
    """nvfp4's scales cannot hold groups much smaller than the largest number MLX scales them for."""
    source = fixture_folder("qwen3_5_untied_text")
    edit_tensors(source, shrink_a_group)
    with pytest.raises(ConvertError, match=r"1 of \d+ groups of 'model.layers.0.linear_attn.in_proj_qkv.weight'"):
        convert(source, tmp_path / "out", quantize=True, q_mode="nvfp4", recipe="uniform")
    convert(source, tmp_path / "affine", quantize=True, q_group_size=32)


@pytest.mark.parametrize(
    "options",
    [
        {"quantize": True, "q_bits": 7},
        {"quantize": True, "q_group_size": 48},
        {"quantize": True, "q_mode": "mxfp4", "q_bits": 8},
        {"quantize": True, "q_mode": "int4"},
        {"q_bits": 4},
        {"dtype": "float8"},
    ],
)
def test_options_that_make_no_sense(options, tmp_path):
    with pytest.raises(RequestError):
        convert("demo", tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_no_mtp_to_keep(fixture_folder, tmp_path):
    with pytest.raises(ConvertError, match="no multi-token-prediction head"):
        convert(fixture_folder("qwen3_5_untied_text"), tmp_path / "out", keep_mtp=True)


def test_a_target_in_use_is_left_alone(fixture_folder, tmp_path):
    source, target = fixture_folder("qwen3_5_untied_text"), tmp_path / "out"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    with pytest.raises(ConvertError, match="not an empty folder"):
        convert(source, target)
    assert folder_bytes(target) == {"notes.txt": b"mine"}
    with pytest.raises(ConvertError, match="not an empty folder"):
        convert(source, target / "notes.txt")
    with pytest.raises(ConvertError, match="not an empty folder"):
        convert(source, source)
    (target / "notes.txt").unlink()
    convert(source, target)  # an empty folder is as good as none
    load_model(target)


def test_something_in_the_way_of_the_unfinished_folder(fixture_folder, tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "mine.txt").write_text("mine")
    with pytest.raises(ConvertError, match="is in the way"):
        convert(fixture_folder("qwen3_5_untied_text"), tmp_path / "out")
    assert (tmp_path / "out.partial" / "mine.txt").read_text() == "mine"


def test_disk_full_leaves_nothing_that_loads(fixture_folder, tmp_path, monkeypatch):
    source = fixture_folder("qwen3_5_untied_text")
    whole = tmp_path / "whole"
    convert(source, whole, shard_size=100_000)
    write, calls = shards.ShardWriter.write, []

    def full(self, name, array):
        calls.append(name)
        if len(calls) == 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.file))
        write(self, name, array)

    with monkeypatch.context() as patch:
        patch.setattr(shards.ShardWriter, "write", full)
        with pytest.raises(ConvertError, match=r"disk full .*No space left.*start again to go on"):
            convert(source, tmp_path / "out", shard_size=100_000)
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError):
        load_model(tmp_path / "out.partial")
    convert(source, tmp_path / "out", shard_size=100_000)
    assert model_bytes(tmp_path / "out") == model_bytes(whole)
    assert not (tmp_path / "out.partial").exists()


def test_too_little_room_is_said_before_writing(fixture_folder, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(ConvertError, match="GB free, but the result needs"):
        convert(fixture_folder("qwen3_5_untied_text"), tmp_path / "out")


def test_the_command_says_it_in_one_line(fixture_folder, tmp_path):
    source = fixture_folder("qwen3_next", shards=3)
    out = tmp_path / "out"
    done = command("--hf-path", source, "--mlx-path", out, "-q", "--q-group-size", 32)
    assert done.returncode == 0, done.stderr
    assert "bits per weight" in done.stdout and "no tokenizer" in done.stderr and "in_proj_ba" in done.stderr
    again = command(source, "-o", out)
    missing_shard(source)
    spoiled = command(source, "-o", tmp_path / "other")
    nobody = command("nobody/nothing-at-all", "-o", tmp_path / "other", env={**os.environ, "HF_HOME": str(tmp_path)})
    for failed, sentence in (
        (again, "not an empty folder"),
        (spoiled, "is missing"),
        (nobody, "nobody/nothing-at-all: not in the local cache"),
        (command(), "no model given"),
    ):
        assert failed.returncode == 2 and failed.stdout == ""
        assert sentence in failed.stderr and failed.stderr.count("\n") == 1, failed.stderr
    assert not (tmp_path / "other").exists()


def test_a_real_limit_on_file_sizes_is_one_line(fixture_folder, tmp_path):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    source = fixture_folder("qwen3_5_untied_text")
    failed = command(source, "-o", tmp_path / "out", preexec_fn=limit)
    assert failed.returncode == 2, failed.stderr
    assert "disk full while writing" in failed.stderr.splitlines()[-1] and "Traceback" not in failed.stderr
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob("out.partial/model*.safetensors"))


def test_dry_run_prints_the_plan_and_writes_nothing(tmp_path):
    done = command("demo", "-q", "--dry-run", "--keep-mtp", cwd=tmp_path)
    assert done.returncode == 0 and not list(tmp_path.iterdir())
    plan = prepare("demo", quantize=True, keep_mtp=True).plan
    assert f"{plan.bits_per_weight:.2f}" in done.stdout
    for words in ("language_model.model.layers.*.linear_attn.in_proj_a.weight", "8-bit", "mtp.safetensors", "decay"):
        assert words in done.stdout


def test_a_folder_without_tokenizer_is_converted_and_told(fixture_folder, tmp_path):
    done = convert(fixture_folder("qwen3_5"), tmp_path / "out")
    assert len(done.notes) == 1 and "has no tokenizer" in done.notes[0]
    load_model(tmp_path / "out")


def test_tokenizer_template_and_generation_config_come_along(tmp_path):
    from mlx_linattn import load

    done = convert("demo", tmp_path / "out")
    assert done.notes == []
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (done.tensors.checkpoint.folder / name).read_bytes()
    _, tokenizer = load(tmp_path / "out")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
