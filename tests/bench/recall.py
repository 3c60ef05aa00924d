"""How well a demo checkpoint remembers: exact answers to the 200 held-out dialogues, by kind.

    python tests/bench/recall.py                       the bundled demo
    python tests/bench/recall.py --model FOLDER        a converted or quantized copy of it
    python tests/bench/recall.py --limit 40 --json     the first 40 dialogues, as JSON
    python tests/bench/recall.py --max-kv-size 256     attention keeps the first 4 and the latest 252 tokens
    python tests/bench/recall.py --kv-bits 4           attention keeps its keys and values in 4 bits

Prompt and expected answer go through the model once: greedy decoding gives exactly the expected answer if and only if
every one of its tokens, and the end token, is the most likely one after those before it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx

import mlx_linattn as la

DIALOGUES = Path(__file__).parents[1] / "fixtures" / "demo" / "dialogues_eval.jsonl"
KINDS = {
    "ask": "told",
    "change": "changed",
    "needle": "hidden in a passage",
    "two": "two facts in a sentence",
    "both": "question in the same message",
    "unknown": "never told",
    "forget": "forgotten",
    "list": "what do you remember?",
}
# Percent right when the model was trained, with attention limited to the last 256 and first 4 tokens.
TRAINED = {"ask": 88.5, "change": 87.0, "needle": 70.0, "two": 93.3, "both": 88.9, "unknown": 100.0, "forget": 100.0}
TRAINED |= {"list": 60.0, "all": 87.5}
BATCH_TOKENS = 8192
KEEP_ALL = la.KVOptions()


def encode(tokenizer, dialogue: dict) -> tuple[list[int], list[int]]:
    """Token ids of the prompt, and of the answer with its end token."""
    prompt = tokenizer.apply_chat_template(dialogue["messages"], add_generation_prompt=True)
    answer = tokenizer.encode(dialogue["answer"], add_special_tokens=False)
    return prompt, [*answer, tokenizer.eos_token_id]


def batches(rows: list[tuple[list[int], list[int]]]) -> Iterator[list[int]]:
    """Indices of rows of similar length, at most BATCH_TOKENS with their padding."""
    lengths = [len(prompt) + len(answer) for prompt, answer in rows]
    batch: list[int] = []
    for i in sorted(range(len(rows)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[i] > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def exact(model, rows: list[tuple[list[int], list[int]]], options: la.KVOptions) -> list[bool]:
    """Whether each answer is what the model would say."""
    inputs = [prompt + answer[:-1] for prompt, answer in rows]
    lengths = [len(ids) for ids in inputs]
    padded = mx.array([ids + [0] * (max(lengths) - len(ids)) for ids in inputs])
    hidden = model.hidden_states(padded, model.make_cache(options), lengths=lengths)
    right = []
    for row, length, (_, answer) in zip(hidden, lengths, rows):
        choices = mx.argmax(model.logits(row[length - len(answer) : length]), axis=-1)
        right.append(choices.tolist() == answer)
    return right


def measure(model, tokenizer, dialogues: list[dict], options: la.KVOptions = KEEP_ALL) -> dict[str, tuple[int, int]]:
    """{kind: (right, asked)}, and the same for "all"."""
    rows = [encode(tokenizer, dialogue) for dialogue in dialogues]
    right = [False] * len(rows)
    for batch in batches(rows):
        for i, correct in zip(batch, exact(model, [rows[i] for i in batch], options)):
            right[i] = correct
    results = {}
    for kind in [*KINDS, "all"]:
        of_kind = [r for r, dialogue in zip(right, dialogues) if kind in (dialogue["kind"], "all")]
        if of_kind:
            results[kind] = (sum(of_kind), len(of_kind))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--limit", type=int, default=None, help="only the first so many dialogues")
    parser.add_argument("--distance", type=int, default=None, help="only dialogues whose fact lies at most so far back")
    parser.add_argument("--max-kv-size", type=int, default=None)
    parser.add_argument("--kv-bits", type=int, default=None)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    with DIALOGUES.open(encoding="utf-8") as lines:
        dialogues = [json.loads(line) for line in lines]
    if args.distance is not None:
        dialogues = [dialogue for dialogue in dialogues if dialogue["distance"] <= args.distance]
    dialogues = dialogues[: args.limit]
    model, tokenizer = la.load(args.model, dtype=args.dtype)
    began = time.perf_counter()
    options = la.KVOptions(max_kv_size=args.max_kv_size, kv_bits=args.kv_bits)
    results = measure(model, tokenizer, dialogues, options)
    seconds = time.perf_counter() - began
    if args.json:
        print(
            json.dumps(
                {
                    "model": args.model,
                    "dtype": args.dtype,
                    "max_kv_size": args.max_kv_size,
                    "kv_bits": args.kv_bits,
                    "seconds": round(seconds, 1),
                    "exact": results,
                }
            )
        )
        return
    kept = f"max_kv_size {args.max_kv_size}" if args.max_kv_size else "full attention"
    kept += f", {args.kv_bits}-bit cache" if args.kv_bits else ""
    print(f"{args.model}, {args.dtype}, {kept}, {len(dialogues)} dialogues in {seconds:.0f} s")
    print(f"{'':<30}{'right':>6}{'of':>5}{'%':>7}{'trained, windowed %':>22}")
    for kind, (right, asked) in results.items():
        print(f"{KINDS.get(kind, kind):<30}{right:>6}{asked:>5}{100 * right / asked:>7.1f}{TRAINED[kind]:>22.1f}")


if __name__ == "__main__":
    main()
