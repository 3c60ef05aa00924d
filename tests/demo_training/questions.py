"""Dialogues for evaluation: facts, some distance, questions, and the exact answers."""

import json
import random
from functools import partial

from dialogue import Dialogue
from encoder import CHARS_PER_TOKEN, Encoder
from open_dialogue import OpenDialogue
from open_vocabulary import OpenVocabulary
from passages import Filler
from phrases import HAVE_READ, READ, UNKNOWN
from rows import loguniform


def eval_dialogue(r, enc, filler, distance, kind="ask", n_facts=4, make=None, **kw):
    """One fact, about `distance` tokens of other things, then one question.

    Returns dict(messages, answer, value, distance, kind, tokens); messages end with the question."""
    d = make() if make else Dialogue(r, filler, casual=False, **kw)
    msgs = []

    def say(t):
        msgs.extend([{"role": "user", "content": t[0]}, {"role": "assistant", "content": t[1]}])
        return len(enc.turn(t[0], t[1])[0])

    for _ in range(r.randint(0, 2)):
        say(d.tell())
    if kind == "needle":
        before = set(d.facts)
        chars = r.randint(300, 1500)
        say(d.read(chars, 1))
        key = next(k for k in d.facts if k not in before)
    elif kind == "unknown":
        say(d.tell())
        key = None
    else:
        before = set(d.facts)
        say(d.tell2() if kind == "two" else d.tell())
        key = next(k for k in d.facts if k not in before)
        if kind == "change":
            say(d.change(key))
        if kind == "forget":
            say(d.forget(key))
    start = sum(len(enc.turn(msgs[i]["content"], msgs[i + 1]["content"])[0]) for i in range(0, len(msgs), 2))
    n = 0
    others = max(0, n_facts - len(d.facts))
    while True:
        left = distance - n
        if left < 40:
            break
        if others and r.random() < 0.4 and left > 80:
            t = d.tell()
            others -= 1
        elif left > 120:
            size = min(left - 30, int(loguniform(r, 100, 6000)))
            p = r.choice(READ).replace("{p}", filler.passage(r, int(size * CHARS_PER_TOKEN)))
            t = (p, HAVE_READ, "")
        else:
            t = d.chat()
        i = enc.turn(t[0], t[1])[0]
        if n + len(i) > distance * 1.05 + 40 and n > 0.9 * distance:
            break
        n += say(t)
    if kind == "unknown":
        q = d.ask_unknown()
    elif kind == "forget":
        d.gone = [key]
        q = (d.fmt(r.choice(d.A), key, "", ""), UNKNOWN, "")
    elif kind == "list":
        q = d.list()
    elif kind == "both":
        while True:
            before = set(d.facts)
            q = d.tell_ask()
            key = next(
                (k for k in d.facts if q[1].endswith(f" {d.facts[k]}.") and (k not in before or r.random() < 0.2)), None
            )
            if key:
                break
    else:
        q = d.ask(key)
    value = d.facts.get(key, "") if key and kind not in ("forget",) else ""
    msgs.append({"role": "user", "content": q[0]})
    return {"messages": msgs, "answer": q[1], "value": value, "distance": n, "kind": kind, "tokens": start + n}


GROUPS = [
    "training's lists",
    "new values",
    "new attributes",
    "new templates",
    "statement and question",
    "two facts",
    "everything new",
]


def eval_open(r, enc, filler, vocab, group, distance=200, facts=3):
    """A short dialogue with words that training never saw (vocab: OpenVocabulary("eval")), in the manner of one of GROUPS."""
    if group == "training's lists":
        return {**eval_dialogue(r, enc, filler, distance, "ask", facts), "kind": group}
    kw = {
        "new values": {"old": 1.0, "known_keys": True, "about": 0},
        "new attributes": {"old": 0.0, "about": 0, "known_values": True},
        "new templates": {"old": 1.0, "known_keys": True, "known_values": True, "about": 0, "held": True},
        "statement and question": {"old": 0.0},
        "two facts": {"old": 0.0},
        "everything new": {"old": 0.0, "about": 0, "held": True},
    }[group]
    d = OpenDialogue(r, filler, vocab, **kw)
    d.casual = group not in ("new values", "new attributes")
    msgs, n = [], 0

    def say(t):
        msgs.extend([{"role": "user", "content": t[0]}, {"role": "assistant", "content": t[1]}])
        return len(enc.turn(t[0], t[1])[0])

    if group == "statement and question":
        for _ in range(r.randint(0, facts - 1)):
            say(d.tell())
        while True:
            u, a, _ = d.tell_ask(r.random() < 0.2)
            if a != UNKNOWN:
                break
        msgs.append({"role": "user", "content": u})
    else:
        if group == "two facts":
            say(d.tell2())
            key = r.choice(list(d.facts))
        else:
            for _ in range(facts):
                say(d.tell())
            key = r.choice(list(d.facts))
        if group == "everything new" and r.random() < 0.3:
            say(d.change(key))
        while distance - n > 60:
            size = min(distance - n, int(loguniform(r, 100, 4000)))
            n += say(
                (r.choice(READ).replace("{p}", filler.passage(r, int((size - 30) * CHARS_PER_TOKEN))), HAVE_READ, "")
                if size > 90
                else d.chat()
            )
        q, a, _ = d.ask(key)
        msgs.append({"role": "user", "content": q})
    value = next((v for v in d.facts.values() if a.endswith(v + ".")), "")
    return {"messages": msgs, "answer": a, "value": value, "distance": n, "kind": group}


def eval_recall(r, enc, filler, distance, facts=7, **kw):
    """Facts (every third one changed, the last one hidden in a passage), about `distance` tokens of reading, then a
    question for each of them and one for something never told.

    Returns (turns before the questions, [(kind, question, answer)], tokens between the last fact and the first question)."""
    d = Dialogue(r, filler, casual=False, **kw)
    turns, kinds = [], {}
    for i in range(facts - 1):
        before = set(d.facts)
        turns.append(d.tell()[:2])
        key = next(k for k in d.facts if k not in before)
        kinds[key] = "told"
        if i % 3 == 1:
            turns.append(d.change(key)[:2])
            kinds[key] = "changed"
    before = set(d.facts)
    turns.append(d.read(r.randint(300, 1500), 1)[:2])
    kinds[next(k for k in d.facts if k not in before)] = "needle"
    n = 0
    while distance - n > 60:
        size = min(distance - n, int(loguniform(r, 200, 8000)))
        t = d.read(int(size * CHARS_PER_TOKEN))[:2] if size > 90 else d.chat()[:2]
        turns.append(t)
        n += len(enc.turn(*t)[0])
    keys = list(kinds)
    r.shuffle(keys)
    qs = [(kinds[k], *d.ask(k)[:2]) for k in keys]
    qs.insert(r.randrange(len(qs)), ("unknown", *d.ask_unknown()[:2]))
    return turns, qs, n


def write_eval(path, out, n=200, seed=90210, held=0.25, known=0.2):
    """known: share with the words of training; held: share of the others with templates that training did not have."""
    enc, filler, vocab = Encoder(path), Filler("eval"), OpenVocabulary("eval")
    with open(out, "w", encoding="utf-8") as f:
        for i in range(n):
            r = random.Random(f"eval/{seed}/{i}")
            kinds = ["ask", "needle", "change", "unknown", "forget", "list", "both", "two"]
            kind = r.choices(kinds, [34, 16, 16, 9, 5, 6, 7, 7])[0]
            distance = int(loguniform(r, 60, 4000))
            new, facts, make = r.random() >= known, r.randint(1, 4 if kind == "list" else 6), None
            if kind == "both":
                distance = min(distance, 400)
            if new or kind in ("both", "two"):
                h = r.random() < held
                words = vocab if new else OpenVocabulary("train")
                options = {"old": 0.0 if new else 0.9, "held": h, "about": 0.0 if h else 0.22}
                make = partial(OpenDialogue, r, filler, words, **options)
            while True:
                e = eval_dialogue(r, enc, filler, distance, kind, facts, make)
                if e["answer"] != UNKNOWN or kind in ("unknown", "forget"):
                    break
            f.write(json.dumps({**e, "words": "new" if new else "known"}, ensure_ascii=False) + "\n")
