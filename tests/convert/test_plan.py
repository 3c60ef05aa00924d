"""The plan says what happens to every tensor, from headers and config alone."""

import json
import re
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from helpers import FIXTURES, assert_close, golden, stock_load, stored
from seeded_fixtures import write_safetensors

from mlx_linattn.convert import convert as convert_and_verify
from mlx_linattn.convert import prepare
from mlx_linattn.convert.bits import Quantization, choose
from mlx_linattn.convert.table import table
from mlx_linattn.errors import RequestError
from mlx_linattn.layout import Quantize
from mlx_linattn.loading import load_model

convert = partial(convert_and_verify, verify=False)

LAYER = re.compile(r"model\.layers\.\d+\.")
END = (3069, 3067)  # <|im_end|>, <|endoftext|>


def by_name(plan):
    return {entry.name: entry for entry in plan.entries}


def test_what_must_not_be_rounded_is_not(fixture_folder, tmp_path):
    plan = prepare(
        fixture_folder("qwen3_5_moe"), tmp_path, quantize=True, q_bits=3, q_group_size=32, recipe="uniform"
    ).plan
    for name, entry in by_name(plan).items():
        kind = name.split(".")[-2]
        if kind in ("gate", "shared_expert_gate", "in_proj_a", "in_proj_b"):
            assert entry.quantization == Quantization(8, 32) and entry.reason, name
        elif name.endswith(("A_log", "dt_bias")) or "norm" in kind or kind == "conv1d":
            assert entry.quantization is None, name
        elif entry.shape[-1] % 32:
            assert entry.quantization is None and "groups of 32" in entry.reason, name
        else:
            assert entry.quantization == Quantization(3, 32), name


def test_config_names_what_differs_from_the_default(fixture_folder, tmp_path):
    convert(fixture_folder("qwen3_5_moe"), tmp_path / "out", quantize=True, q_group_size=32, recipe="uniform")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    block = config["quantization"]
    assert block == config["quantization_config"]
    assert {key: block[key] for key in ("bits", "group_size", "mode")} == {
        "bits": 4,
        "group_size": 32,
        "mode": "affine",
    }
    router = "language_model.model.layers.0.mlp.gate"
    assert block[router] == {"bits": 8, "group_size": 32, "mode": "affine"}
    assert "vision_config" not in config and list(config) == sorted(config)
    names = stored(tmp_path / "out")
    assert all(f"{module}.scales" in names for module in block if "." in module)


def test_a_published_quantization_block_does_not_survive(fixture_folder, tmp_path):
    convert(fixture_folder("qwen3_5_fp8"), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config and "quantization_config" not in config["text_config"]


def test_planning_reads_no_numbers(fixture_folder, tmp_path):
    source = fixture_folder("qwen3_next_fp8")
    before = prepare(source, tmp_path, quantize=True, q_group_size=32).plan
    empty = {name: (dtype, np.zeros_like(array)) for name, (dtype, array) in stored(source).items()}
    write_safetensors(source / "model.safetensors", empty)
    assert prepare(source, tmp_path, quantize=True, q_group_size=32).plan == before


def test_types_known_to_stock_are_those_it_imports():
    from mlx_linattn.convert.planning import _other_names, known_to_mlx_lm
    from mlx_linattn.interop.door import mlx_lm

    utils = mlx_lm("utils")
    assert _other_names(Path(utils.__file__)) == utils.MODEL_REMAPPING
    for model_type in ("qwen3_5", "qwen3_next", "falcon_mamba", "gla", "qwen3_5_text"):
        try:
            utils._get_classes({"model_type": model_type})
            imports = True
        except ValueError:
            imports = False
        assert known_to_mlx_lm(model_type) == imports, model_type


def test_every_source_tensor_is_accounted_for(fixture_folder, tmp_path):
    conversion = prepare(fixture_folder("qwen3_5_moe_fp8"), tmp_path, keep_mtp=True)
    plan, tensors = conversion.plan, conversion.tensors
    used = {
        tensors.stored[part]
        for e in plan.entries
        for source in e.take.sources
        for part in tensors.encoding(source).parts
    }
    everything = set(tensors.checkpoint.tensors)
    assert used | set(plan.mtp) | set(plan.dropped) == everything
    assert len(used) + len(plan.mtp) + len(plan.dropped) == len(everything)


def test_bytes_and_table_are_those_of_the_files(fixture_folder, tmp_path):
    done = convert(fixture_folder("qwen3_5_moe"), tmp_path / "out", quantize=True, q_group_size=32)
    assert done.plan.nbytes == sum(data.nbytes for _, data in stored(tmp_path / "out").values())
    lines = table(done.plan).splitlines()
    header, rows = lines[0].split(), [line.split() for line in lines[1:] if "language_model" in line]
    assert header == ["tensor", "count", "parameters", "before", "after", "bytes", "bits/weight"]
    assert sum(int(row[1]) for row in rows) == len(done.plan.entries)
    assert any("of weights: fits in the" in line for line in lines)
    assert any("vision tower" in line for line in lines) and any("router" in line for line in lines)


def test_a_plan_that_does_not_fit_says_so(monkeypatch, tmp_path):
    plan = prepare("demo", tmp_path).plan
    monkeypatch.setattr("mlx_linattn.convert.table.working_set", lambda: 1_000_000)
    assert "does not fit in the 1.00 MB of memory here" in table(plan)


def test_shards_hold_everything_in_order_within_the_limit(fixture_folder, tmp_path):
    plan = prepare(fixture_folder("qwen3_5_moe"), tmp_path).plan
    for limit in (1, 20_000, 10**9):
        shards = plan.shards(limit)
        assert [entry for shard in shards for entry in shard] == list(plan.entries)
        assert all(len(shard) == 1 or sum(e.nbytes for e in shard) <= limit for shard in shards)


RULES = (Quantize(r".*\.conv", None, "conv"), Quantize(r".*\.gate", 8, "router"))


@pytest.mark.parametrize(
    ("module", "row", "asked", "want"),
    [
        ("a.up", 128, Quantization(4, 64), Quantization(4, 64)),
        ("a.up", 96, Quantization(4, 64), None),
        ("a.conv", 128, Quantization(4, 64), None),
        ("a.gate", 128, Quantization(4, 64), Quantization(8, 64)),
        ("a.gate", 128, Quantization(8, 32), Quantization(8, 32)),
        ("a.gate", 128, Quantization(4, 32, "mxfp4"), Quantization(8, 64)),
        ("a.gate", 96, Quantization(4, 16, "nvfp4"), Quantization(8, 32)),
        ("a.up", 96, Quantization(4, 16, "nvfp4"), Quantization(4, 16, "nvfp4")),
        ("mixer.q", 128, Quantization(4, 64), Quantization(5, 64)),
        ("mixer.q", 128, Quantization(6, 64), Quantization(8, 64)),
        ("mixer.q", 128, Quantization(8, 64), Quantization(8, 64)),
        ("mixer.q", 128, Quantization(4, 32, "mxfp4"), Quantization(5, 64)),
        ("mixer.gate", 128, Quantization(4, 64), Quantization(8, 64)),
        ("mixer.conv", 128, Quantization(4, 64), None),
    ],
)
def test_choice_of_bits(module, row, asked, want):
    choice = choose(module, (7, row), asked, RULES, "raised" if module.startswith("mixer") else "")
    assert choice.quantization == want
    assert bool(choice.reason) == (want != asked)


def test_a_model_of_mixers_alone_gets_what_was_asked(fixture_folder, tmp_path):
    plan = prepare(fixture_folder("mamba"), tmp_path, quantize=True, q_group_size=32).plan
    got = {e.name.split(".")[-2]: e.quantization.bits for e in plan.entries if e.quantization}
    assert got["in_proj"] == got["out_proj"] == 4 and got["x_proj"] == 8 and got["embeddings"] == 5


def test_mixers_and_head_get_a_step_more(fixture_folder, tmp_path):
    plan = prepare(fixture_folder("qwen3_5_moe"), tmp_path, quantize=True, q_group_size=32).plan
    bits = {LAYER.sub("", name).removesuffix(".weight"): e.quantization for name, e in by_name(plan).items()}
    wanted = {"lm_head": 5, "model.embed_tokens": 5, "linear_attn.in_proj_qkv": 5, "self_attn.q_proj": 5}
    wanted |= {"linear_attn.in_proj_a": 8, "mlp.gate": 8, "mlp.switch_mlp.up_proj": 4, "mlp.shared_expert.gate_proj": 4}
    assert {name: bits[name].bits for name in wanted} == wanted


def test_rules_come_first_and_the_first_that_matches_decides(fixture_folder, tmp_path):
    (tmp_path / "recipe").write_text("# after the command line's\n\nmlp=2\nlm_head=mxfp8\n")
    rules = [r"layers\.0\..*up_proj=6,g=32", "up_proj=bf16"]
    source = fixture_folder("qwen3_5_moe")
    plan = prepare(source, tmp_path, True, 32, rules=rules, recipe_file=tmp_path / "recipe").plan
    got = {name: str(e.quantization or e.dtype) for name, e in by_name(plan).items()}
    assert got["model.layers.0.mlp.switch_mlp.up_proj.weight"] == "6-bit g32"
    assert got["model.layers.1.mlp.switch_mlp.up_proj.weight"] == "BF16"
    assert got["model.layers.1.mlp.switch_mlp.gate_proj.weight"] == "2-bit"
    assert got["lm_head.weight"] == "mxfp8" and got["model.layers.0.linear_attn.in_proj_qkv.weight"] == "5-bit g32"
    alone = prepare(source, tmp_path, rules=["lm_head=8"]).plan
    assert [e.name for e in alone.entries if e.quantization] == ["lm_head.weight"]
    convert(source, tmp_path / "out", True, 32, rules=rules, recipe_file=tmp_path / "recipe", dtype="float32")
    ids = golden("qwen3_5_moe")["input_ids"]
    stock, ours = stock_load(tmp_path / "out")[0], load_model(tmp_path / "out")[0]
    assert_close(ours(ids), np.array(stock(mx.array(ids))), 1e-4)


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        ("mlp", "not of the form"),
        ("mlp=seven", "neither bits nor one of"),
        ("mlp=7", "bits 7 does not exist"),
        ("mlp=mxfp4,g=64", "group size 64 does not exist"),
        ("mlp=bf16,g=64", "has no groups"),
        ("ml(p=4", "not a regular expression"),
        ("A_log=4", "matches no weight that can be quantized"),
        ("nothing_of_this_name=4", "matches no weight"),
    ],
)
def test_rules_that_make_no_sense(rule, sentence, tmp_path):
    with pytest.raises(RequestError, match=sentence):
        prepare("demo", tmp_path, rules=[rule])


def test_a_rule_that_earlier_ones_leave_nothing_is_an_error(tmp_path):
    with pytest.raises(RequestError, match=r"'up_proj=6' matches no weight"):
        prepare("demo", tmp_path, rules=["mlp=4", "up_proj=6"])


def agreement(folder, prompts: int = 4) -> tuple[float, int]:
    """The share of the golden answers' tokens, end tokens included, that the demo in ``folder`` gives; and their number."""
    model, _ = load_model(folder)
    reference = np.load(FIXTURES / "demo" / "golden.npz")
    names = [f"prompt{i}{mode}" for i in range(prompts) for mode in ("", "_thinking")]
    questions = [reference[f"{name}_ids"].tolist() for name in names]
    answers = [reference[f"{name}_greedy"].tolist() for name in names]
    answers = [answer[: 1 + min(i for i, token in enumerate(answer) if token in END)] for answer in answers]
    padding = [max(map(len, questions)) - len(question) for question in questions]
    cache = model.make_cache()
    ids = [[0] * n + question for n, question in zip(padding, questions)]
    got = [mx.argmax(model(ids, cache, left_padding=padding)[:, -1], axis=-1)]
    while len(got) < max(map(len, answers)):
        got.append(mx.argmax(model(got[-1][:, None], cache)[:, -1], axis=-1))
        mx.eval(got[-1])
    given = mx.stack(got, axis=1).tolist()
    same = [a == b for answer, mine in zip(answers, given) for a, b in zip(answer, mine)]
    return sum(same) / len(same), len(same)


def quantized_demo(folder, **options):
    """The demo after quantization as plain numbers: MLX multiplies quantized matrices slowly on a CPU."""
    convert("demo", folder / "quantized", quantize=True, **options)
    convert(folder / "quantized", folder / "numbers", dequantize=True, dtype="float32")
    return folder / "numbers"


@pytest.mark.parametrize(("bits", "least"), [(8, 1.0), (4, 0.98)])
def test_the_default_recipe_keeps_the_demos_answers(bits, least, tmp_path):
    """Greedy answers to golden questions, each token after the model's own text."""
    share, tokens = agreement(quantized_demo(tmp_path, q_bits=bits))
    assert tokens == 157 and share >= least


def test_two_bits_everywhere_lose_the_demos_answers(tmp_path):
    """The measure can fail."""
    share, _ = agreement(quantized_demo(tmp_path, q_bits=2, recipe="uniform"), prompts=2)
    assert share < 0.5
