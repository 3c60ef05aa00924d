"""Harm is measured kind by kind, and a size is spent where it saves most."""

import subprocess
import sys

import mlx.core as mx
import pytest

from mlx_linattn.convert import convert, prepare
from mlx_linattn.convert.quality import compare
from mlx_linattn.convert.sensitivity import Kind, Trials, best_recipe, kinds, measure, recipe, rules
from mlx_linattn.errors import RequestError
from mlx_linattn.weights.checkpoint import Checkpoint


def test_harm_is_the_divergence_with_one_kind_rounded(fixture_folder, tmp_path):
    source = fixture_folder("qwen3_next")
    plan = prepare(source, tmp_path, quantize=True, q_group_size=32).plan
    ids = mx.random.randint(0, 88, (2, 30), key=mx.random.key(1))
    found = kinds(plan, 32)
    assert not any(kind.name.endswith(("in_proj_ba.weight", "mlp.gate.weight")) for kind in found)
    some = [kind for kind in found if kind.name.endswith(("in_proj_qkvz.weight", "q_proj.weight"))]
    measure(Trials(Checkpoint(source), ids, 32), some, widths=(3, 8))
    for kind in some:
        assert kind.harm[3] > 10 * kind.harm[8] > 0
        out = tmp_path / kind.name
        convert(source, out, rules=[f"{kind.rule}=3,g=32"], verify=False)
        assert compare(Checkpoint(source), Checkpoint(out), ids).mean_kl == pytest.approx(kind.harm[3], rel=1e-2)


def test_the_recipe_keeps_to_the_size_and_spends_it_well(fixture_folder, tmp_path):
    source = fixture_folder("qwen3_5_moe")
    plan = prepare(source, tmp_path, quantize=True, q_group_size=32).plan
    found = kinds(plan, 32)
    for i, kind in enumerate(found):  # the first minds most
        kind.harm = {bits: 4.0**-bits / (1 + i) ** 4 for bits in (2, 3, 4, 5, 6, 8)}
    for target in (9.5, 10.5, 12.0):
        chosen = recipe(plan, found, target)
        made = prepare(source, tmp_path, True, 32, rules=rules(found, chosen, 32)).plan
        assert target - 0.7 < made.bits_per_weight <= target
        assert chosen[found[0].name] > chosen[found[-1].name]
    with pytest.raises(RequestError, match="cannot be reached"):
        recipe(plan, found, 3.0)


def test_the_best_recipe_is_tried_as_a_whole_and_beats_the_uniform_one(fixture_folder, tmp_path):
    source = fixture_folder("qwen3_5")
    uniform = prepare(source, tmp_path, True, 32, recipe="uniform").plan
    ids = mx.random.randint(0, 88, (2, 30), key=mx.random.key(1))
    found, trials = kinds(uniform, 32), Trials(Checkpoint(source), ids, 32)
    measure(trials, found, widths=(2, 3, 4, 6))
    chosen, harm = best_recipe(uniform, found, trials, uniform.bits_per_weight)
    harms = []
    for floor in (2, 3, 4):
        bits = recipe(uniform, found, uniform.bits_per_weight, floor)
        harms.append(trials.harm({weight: bits[kind.name] for kind in found for weight in kind.weights}))
    assert harm == pytest.approx(min(harms), rel=1e-5) and max(harms) > 1.01 * min(harms)
    assert harm <= trials.harm({weight: 4 for kind in found for weight in kind.weights})
    made = prepare(source, tmp_path, True, 32, rules=rules(found, chosen, 32)).plan
    assert made.bits_per_weight <= uniform.bits_per_weight
    assert trials.harm({}) < 1e-9  # nothing of earlier trials is left


def test_a_kind_that_does_not_mind_gets_the_fewest_bits(fixture_folder, tmp_path):
    plan = prepare(fixture_folder("qwen3_5_moe"), tmp_path, quantize=True, q_group_size=32).plan
    found: list[Kind] = kinds(plan, 32)
    for kind in found:
        kind.harm = dict.fromkeys((2, 4, 8), 0.0) if "up_proj" in kind.name else {2: 1.0, 4: 0.1, 8: 0.01}
    chosen = recipe(plan, found, 32.0)
    assert {bits for name, bits in chosen.items() if "up_proj" in name} == {2}
    assert {bits for name, bits in chosen.items() if "up_proj" not in name} == {8}


def test_the_command_prints_a_recipe_that_can_be_used(fixture_folder, tmp_path):
    source = str(fixture_folder("qwen3_5"))
    words = [sys.executable, "-m", "mlx_linattn.cli", "convert", source, "--q-group-size", "32"]
    told = subprocess.run(
        [*words, "--sensitivity", "--target-bits", "6.5"], capture_output=True, text=True, timeout=300
    )
    assert told.returncode == 0, told.stderr
    assert "mean KL divergence" in told.stderr and told.stdout.startswith("# ")
    (tmp_path / "recipe").write_text(told.stdout)
    plan = prepare(source, tmp_path, True, 32, recipe_file=tmp_path / "recipe").plan
    assert 6.0 < plan.bits_per_weight <= 6.5
