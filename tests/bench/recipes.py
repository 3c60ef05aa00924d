"""Quantization recipes of one size against each other, on the bundled demo: ours, uniform, and mlx_lm's mixed_* ones.

    python tests/bench/recipes.py [--tokens 512]

The recipe is measured on some dialogues and judged on others. Each line gives size and mean KL divergence from the source;
for every recipe of mlx_lm and each uniform width, ours of at most its size follows. Exits 1 where ours is the worse one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from mlx_linattn import load
from mlx_linattn.convert import convert, prepare
from mlx_linattn.convert.quality import compare, rows_of
from mlx_linattn.convert.sensitivity import Trials, best_recipe, kinds, measure, rules
from mlx_linattn.interop.door import mlx_lm
from mlx_linattn.loading import resolve
from mlx_linattn.weights.checkpoint import Checkpoint

DIALOGUES = Path(__file__).parent.parent / "fixtures" / "demo" / "dialogues_eval.jsonl"
WIDTHS = (3, 4, 5, 6, 8)


def texts(tokens: int):
    """Two disjoint sets of dialogues as rows of tokens."""
    _, tokenizer = load("demo")
    found: list[list[int]] = [[], []]
    for i, line in enumerate(DIALOGUES.read_text().splitlines()):
        one = json.loads(line)
        messages = [*one["messages"], {"role": "assistant", "content": one["answer"]}]
        found[i % 2] += list(tokenizer.apply_chat_template(messages, tokenize=True))
        if all(len(ids) >= tokens for ids in found):
            break
    return [rows_of(ids[:tokens]) for ids in found]


def by_mlx_lm(plain: Path, target: Path, name: str) -> float:
    """mlx_lm's own recipe on the same weights; returns bits per weight."""
    utils, module = mlx_lm("utils"), mlx_lm("convert")
    model, config = utils.load_model(plain)
    predicate = module.mixed_quant_predicate_builder(name, model, 64)
    model, config = utils.quantize_model(model, config, 64, 4, quant_predicate=predicate)
    utils.save_model(target, model)
    for block in ("quantization", "quantization_config"):
        config[block] = {k: v for k, v in config[block].items() if v is not None}
    utils.save_config(config, target / "config.json")
    return utils.compute_bits_per_weight(model)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=512)
    tokens = parser.parse_args().tokens
    source = resolve("demo")
    calibration, judged = texts(tokens)
    plan = prepare("demo", quantize=True).plan
    found = kinds(plan, 64)
    trials = Trials(Checkpoint(source), calibration)
    measure(trials, found, WIDTHS, lambda done, total, name: print(done, "of", total, name, file=sys.stderr))
    worse = 0

    def judge(name: str, bits: float, folder: Path) -> float:
        quality = compare(Checkpoint(source), Checkpoint(folder), judged)
        print(
            f"{name:<28} {bits:6.3f} bits/weight   KL {quality.mean_kl:.4f}   same token {quality.top_1_agreement:.1%}",
            flush=True,
        )
        return quality.mean_kl

    with tempfile.TemporaryDirectory() as place:
        at = Path(place)
        convert("demo", at / "plain", verify=False)
        others = {f"uniform {bits}": {"q_bits": bits, "recipe": "uniform"} for bits in (4, 5)}
        others |= {"balanced 4": {"q_bits": 4}}
        others |= dict.fromkeys(("mixed_3_4", "mixed_3_6", "mixed_4_6"))
        for name, options in others.items():
            if options is None:
                bits = by_mlx_lm(at / "plain", at / name, name)
            else:
                bits = convert("demo", at / name, quantize=True, verify=False, **options).plan.bits_per_weight
            theirs = judge(f"mlx_lm {name}" if options is None else name, bits, at / name)
            chosen = rules(found, best_recipe(plan, found, trials, bits)[0])
            made = convert("demo", at / f"{name}-ours", quantize=True, rules=chosen, verify=False).plan
            worse += judge("  measured, of that size", made.bits_per_weight, at / f"{name}-ours") > theirs
    return int(worse > 0)


if __name__ == "__main__":
    sys.exit(main())
