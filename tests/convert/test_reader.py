"""Large tensors and whole models are read in parts, and the parts are those of the whole."""

import json

import mlx.core as mx
import pytest
from helpers import assert_close

from mlx_linattn.convert import convert, prepare, reader
from mlx_linattn.convert.quality import memory_needed
from mlx_linattn.convert.tensors import numbers, packed_parts
from mlx_linattn.layout import Take
from mlx_linattn.loading import load_model
from mlx_linattn.weights.checkpoint import Checkpoint
from mlx_linattn.weights.transform import keeps_rows

PUBLISHED = [
    "qwen3_5_moe",
    "qwen3_5_moe_fp8",
    "qwen3_5_nvfp4",
    "qwen3_5_fp8",
    "kimi_k3",
    "minimax_text_01",
    "jamba",
    "fla_gla",
]


def same_in_parts(conversion) -> set[str]:
    """Checks every tensor's rows against the whole; the kinds of source that were cut."""
    tensors, cut = conversion.tensors, set()
    for entry in conversion.plan.entries:
        if not entry.shape:
            continue
        reads = [numbers] if entry.was is None else [numbers, lambda *args: mx.concatenate(packed_parts(*args)[:1])]
        for read in reads:
            whole = read(entry, tensors)
            middle = slice(entry.shape[0] // 3, entry.shape[0] // 3 + max(1, entry.shape[0] // 3))
            assert mx.array_equal(read(entry, tensors, middle), whole[middle]), entry.name
        if tensors.can_cut(entry.take):
            cut.add(f"{entry.encoding} {len(entry.shape)}")
    return cut


def test_rows_are_those_of_the_whole_tensor(fixture_folder, tmp_path):
    cut = set()
    for name in PUBLISHED:
        cut |= same_in_parts(prepare(fixture_folder(name), tmp_path))
    assert cut >= {"plain 2", "plain 3", "fp8 blocks 3", "nvfp4 2"}


@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
def test_rows_of_quantized_tensors_are_those_of_the_whole(mode, fixture_folder, tmp_path):
    convert(fixture_folder("qwen3_5_moe"), tmp_path / "out", True, 32, q_mode=mode, verify=False)
    assert same_in_parts(prepare(tmp_path / "out", tmp_path)) >= {"plain 2", "plain 3"}


def test_a_file_that_became_shorter_is_told(fixture_folder, tmp_path):
    from mlx_linattn.errors import CheckpointError

    checkpoint = Checkpoint(fixture_folder("qwen3_5"))
    name, info = max(checkpoint.tensors.items(), key=lambda item: item[1].begin)
    with info.file.open("r+b") as stream:
        stream.truncate(info.begin + 1)
    with pytest.raises(CheckpointError, match="became shorter"):
        checkpoint.read(name, slice(0, 1))


@pytest.mark.parametrize("name", ["qwen3_5_moe", "kimi_k3", "recurrent_gemma", "mamba", "qwen3_next"])
def test_layer_by_layer_is_the_whole_model(name, fixture_folder, monkeypatch):
    monkeypatch.setattr(reader, "PIECE", 2000)
    folder = fixture_folder(name)
    model, _ = load_model(folder, dtype="float32")
    read = reader.Reader(Checkpoint(folder))
    assert len(read.slices(read.head)) > 1
    ids = mx.random.randint(0, 80, (2, 9), key=mx.random.key(0))
    want = model(ids)
    whole = read.model
    whole.embed, whole.layers = read.embed, [read.layer(i) for i in range(len(whole.layers))]
    for part in ("norm", "output_mix"):
        if part in whole:
            read.fill(whole[part], part)
    whole.make_cache = model.make_cache
    hidden = whole.hidden_states(ids)
    whole.embed = model.embed
    got = mx.concatenate([read.logits(hidden, tokens) for tokens in read.slices(read.head)], axis=-1)
    assert_close(got, want, 1e-4)


def test_experts_are_read_one_by_one_and_only_those_that_are_chosen(fixture_folder, monkeypatch):
    folder = fixture_folder("qwen3_5_moe")
    checkpoint = Checkpoint(folder)
    read, asked = reader.Reader(checkpoint), []
    layer = read.layer(0)
    original = Checkpoint.read_ranges

    def spy(self, name, axis, ranges):
        asked.append((axis, *ranges))
        return original(self, name, axis, ranges)

    monkeypatch.setattr(Checkpoint, "read_ranges", spy)
    monkeypatch.setattr(Checkpoint, "read", None)
    experts = layer.mlp.switch_mlp
    chosen = mx.array([[2, 0], [2, 2]])
    experts(mx.random.normal((2, read.spec.hidden_size)), chosen)
    assert set(asked) <= {(0, (0, 1)), (0, (2, 3))} and len(asked) == 6
    assert not checkpoint._taken


def test_memory_grows_with_a_layer_not_with_its_experts(fixture_folder, tmp_path):
    from dataclasses import replace

    plan = prepare(fixture_folder("qwen3_5_moe"), tmp_path).plan
    more = [
        replace(entry, shape=(8 * entry.shape[0], *entry.shape[1:])) if "switch_mlp" in entry.target else entry
        for entry in plan.entries
    ]
    wide = [replace(entry, shape=(*entry.shape[:-1], 8 * entry.shape[-1])) for entry in plan.entries]
    assert memory_needed(replace(plan, entries=tuple(more))) == memory_needed(plan)
    assert memory_needed(replace(plan, entries=tuple(wide))) > memory_needed(plan)
    assert memory_needed(plan, 4096) > memory_needed(plan, 1024)


def test_which_steps_keep_rows():
    half = ("part", -2, 0, 2)
    assert keeps_rows(Take("a"), 2) and keeps_rows(Take("a", half), 3)
    assert not keeps_rows(Take("a", half), 2) and not keeps_rows(Take("a", ("part", 0, 0, 2)), 3)
    assert not keeps_rows(Take(("a", "b")), 3) and not keeps_rows(Take("a", ("ungroup", 2, (1,), (0,))), 3)


def test_a_module_that_names_no_mode_is_affine_whatever_the_others_are(fixture_folder, tmp_path):
    out = tmp_path / "out"
    convert(fixture_folder("qwen3_5"), out, True, 32, q_mode="mxfp4", rules=["down_proj=8,g=32"], verify=False)
    name = "layers.0.mlp.down_proj.weight"
    want = reader.Reader(Checkpoint(out)).read(name)
    config = json.loads((out / "config.json").read_text())
    for key in ("quantization", "quantization_config"):
        config[key]["mode"] = "mxfp4"
        for override in config[key].values():
            if isinstance(override, dict):
                override.pop("mode", None)
    (out / "config.json").write_text(json.dumps(config))
    assert mx.array_equal(reader.Reader(Checkpoint(out)).read(name), want)
