"""Scores a checkpoint: exact answers by distance between fact and question, with full attention and with a
256-token window plus 4 sinks; and how often the MTP head's guess is the token the model itself picks.

    python evaluate.py --dir demo [--device cuda] [--per 40] [--distances 500,1000,4000,16000,64000,131072]
    python evaluate.py --dir demo --recall --distances 250,1000,4000,16000,64000,131072 --counts 20,20,20,10,6,4
    python evaluate.py --dir demo --file demo/dialogues_eval.jsonl
    python evaluate.py --dir demo --open 30               by what is new: values, attribute nouns, templates, ...

Answers are scored by running prompt and expected answer through the model once: greedy decoding gives exactly the
expected answer if and only if every one of its tokens is the most likely one given the tokens before it.
"""

import argparse
import json
import random
import time

import model as M
import torch
from encoder import Encoder, prompt_ids
from open_vocabulary import OpenVocabulary
from passages import Filler
from questions import GROUPS, eval_dialogue, eval_open, eval_recall

MODES = {"full": (None, 0), "window": (256, 4)}


@torch.no_grad()
def score(net, enc, item, window, sinks, device, thinking=False):
    """(exact, drafts accepted, drafts made)"""
    prompt = prompt_ids(enc, item["messages"], thinking)
    answer = enc.encode(item["answer"]) + enc.end
    ids = torch.tensor([prompt + answer], device=device)
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        h = net.trunk(ids, None, window, sinks)
        n = len(answer)
        best = net.logits(h[-n - 1 : -1]).argmax(-1)
        exact = best.tolist() == answer
        # the draft for answer token i+1 is made from the state before answer token i and that token
        lo = max(0, ids.shape[1] - 4096)  # the head's own attention: enough of the past
        e = net.draft(h[lo:-1], ids[:, lo + 1 :], None, window, sinks)
        draft = net.logits(e[-n:-1]).argmax(-1)
    return exact, int((draft == best[1:]).sum()), n - 1


@torch.no_grad()
def score_recall(net, enc, case, window, sinks, device):
    """[(kind, exact)] and (drafts accepted, made) for a dialogue that ends with several questions."""
    turns, qs, _ = case
    ids, marks = [], []
    for u, a in turns:
        ids += enc.turn(u, a)[0]
    for kind, q, a in qs:
        t = enc.turn(q, a, "")[0]
        n = len(enc.encode(a)) + 1
        end = len(ids) + len(t) - 1  # the turn's last token is a newline
        marks.append((kind, end - n, end))
        ids += t
    x = torch.tensor([ids], device=device)
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        h = net.trunk(x, None, window, sinks)
        lo = max(0, min(m[1] for m in marks) - 1024)
        best = net.logits(h[lo:]).argmax(-1).tolist()  # best[i]: the model's choice for position lo + i + 1
        e = net.draft(h[lo:-1], x[:, lo + 1 :], None, window, sinks)
        draft = net.logits(e).argmax(-1).tolist()  # draft[i]: the guess for position lo + i + 2
    out, acc, made = [], 0, 0
    for kind, s, t in marks:
        out.append((kind, best[s - 1 - lo : t - 1 - lo] == ids[s:t]))
        acc += sum(draft[p - 2 - lo] == best[p - 1 - lo] for p in range(s + 1, t))
        made += t - s - 1
    return out, acc, made


def recall(net, enc, a):
    """Accuracy by distance, all the questions of a dialogue in one pass."""
    filler = Filler("eval")
    for mode in a.modes.split(","):
        for dist, n in zip(map(int, a.distances.split(",")), map(int, a.counts.split(","))):
            t, res, acc, made, used = time.time(), {}, 0, 0, []
            for i in range(n):
                case = eval_recall(random.Random(f"{a.seed}/recall/{dist}/{i}"), enc, filler, dist, a.facts)
                out, x, y = score_recall(net, enc, case, *MODES[mode], a.device)
                acc += x
                made += y
                used.append(case[2])
                for kind, ok in out:
                    s = res.setdefault(kind, [0, 0])
                    s[0] += ok
                    s[1] += 1
            ok, all_ = sum(s[0] for s in res.values()), sum(s[1] for s in res.values())
            kinds = ", ".join(f"{k} {s[0]}/{s[1]}" for k, s in sorted(res.items()))
            print(
                f"{mode:6s} {a.facts} facts, distance {sum(used) // n:7d}: exact {100 * ok / all_:5.1f}% of {all_} questions "
                f"in {n} dialogues ({kinds}), drafts accepted {100 * acc / made:.1f}%, {time.time() - t:.0f}s",
                flush=True,
            )


def groups_of(enc, a):
    """{(kind, distance): dialogues} that the options ask for."""
    groups = {}
    if a.file:
        with open(a.file, encoding="utf-8") as f:
            for dialogue in map(json.loads, f):
                groups.setdefault((dialogue["kind"], ""), []).append(dialogue)
        return groups
    filler = Filler("eval")
    if a.open:
        vocab = OpenVocabulary("eval")
        for g in GROUPS:
            seeds = [random.Random(f"open/{g}/{i}") for i in range(a.open)]
            groups[g, ""] = [eval_open(r, enc, filler, vocab, g, a.distance) for r in seeds]
        return groups
    for kind in a.kinds.split(","):
        for dist in map(int, a.distances.split(",")):
            seeds = [random.Random(f"{a.seed}/{kind}/{dist}/{i}") for i in range(a.per)]
            groups[kind, dist] = [
                eval_dialogue(r, enc, filler, dist, kind, n_facts=1 + i % 6) for i, r in enumerate(seeds)
            ]
    return groups


def options():
    ap = argparse.ArgumentParser()
    ap.add_argument("--dir", default="demo")
    ap.add_argument("--device", default="cpu")
    ap.add_argument("--file", default="")
    ap.add_argument("--per", type=int, default=40)
    ap.add_argument("--kinds", default="ask,needle,change,unknown")
    ap.add_argument("--distances", default="250,1000,4000,16000,64000,131072")
    ap.add_argument("--modes", default="full,window")
    ap.add_argument(
        "--recall", action="store_true", help="many questions per dialogue; with --counts, the dialogues per distance"
    )
    ap.add_argument("--counts", default="20,20,20,10,6,4")
    ap.add_argument("--facts", type=int, default=7, help="with --recall: facts per dialogue")
    ap.add_argument("--open", type=int, default=0, help="score so many dialogues of each group of questions.GROUPS")
    ap.add_argument("--distance", type=int, default=200, help="with --open: tokens between facts and question")
    ap.add_argument("--show", type=int, default=0, help="1 prints what goes wrong")
    ap.add_argument("--seed", type=int, default=7)
    return ap.parse_args()


def main():
    a = options()
    net, enc = M.load(a.dir, a.device), Encoder(a.dir)
    if a.recall:
        return recall(net, enc, a)
    total = {m: [0, 0, 0, 0] for m in a.modes.split(",")}
    for (kind, dist), items in groups_of(enc, a).items():
        line = f"{kind:22s} {dist!s:>7s} n={len(items)}"
        for mode in a.modes.split(","):
            t, r = time.time(), [score(net, enc, d, *MODES[mode], a.device) for d in items]
            for d, x in zip(items, r):
                if not x[0] and a.show:
                    print("   wrong:", mode, d["kind"], d["distance"], d["messages"][-1]["content"], "->", d["answer"])
            ex, acc, made = (sum(x[i] for x in r) for i in range(3))
            for i, x in enumerate((ex, len(r), acc, made)):
                total[mode][i] += x
            line += f" | {mode} exact {100 * ex / len(r):5.1f}% draft {100 * acc / max(made, 1):5.1f}% ({time.time() - t:.0f}s)"
        print(line, flush=True)
    for m, (ex, n, acc, made) in total.items():
        print(f"all {m}: exact {100 * ex / n:.1f}% of {n}, drafts accepted {100 * acc / made:.1f}%")


if __name__ == "__main__":
    main()
