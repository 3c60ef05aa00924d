"""Training rows: dialogues of an exact length in tokens."""

import random

import numpy as np
from dialogue import Dialogue
from encoder import CHARS_PER_TOKEN, CONTEXT, IGNORE, Encoder
from open_dialogue import OpenDialogue
from open_vocabulary import OpenVocabulary
from passages import Filler
from phrases import SYSTEM


def training_row(r, enc, filler, length, vocab=None, share=0.77):
    """One dialogue of exactly `length` tokens; with a vocabulary, `share` of them are of the open kind."""
    if r.random() < 0.015:  # a little plain text
        ids = enc.encode("\n\n".join(filler.blocks(r, int(length * 4.5))))[: length - 1] + enc.encode("<|endoftext|>")
        if len(ids) == length:
            return ids, [CONTEXT] * length
    free = vocab is not None and r.random() < share
    d = OpenDialogue(r, filler, vocab) if free else Dialogue(r, filler)
    ids, cls = [], []
    mode = r.choice(["bare", "bare", "empty", "empty", "think", "mixed"])
    if r.random() < 0.4:
        s = enc.sys_head + enc.encode(r.choice(SYSTEM)) + enc.end + enc.nl
        ids += s
        cls += [IGNORE] * len(s)
    # how many facts, and how much of the row is filler
    max_facts = r.choice([1, 2, 3, 4, 5, 6, 8, 10])
    if length >= 4096:
        max_facts = r.choice([3, 4, 6, 8, 10, 12])
    fill = r.choice([0.0, 0.3, 0.6, 0.8]) if length <= 1024 else r.choice([0.5, 0.8, 0.9, 0.95])
    filled, told = 0, 0
    reserve = min(length // 3, 60 + 28 * max_facts)

    def push(t):
        user, answer, thought = t
        m = mode if mode != "mixed" else r.choice(["bare", "empty", "think"])
        if mode == "bare" and len(ids) > length - 250:
            m = r.choice(["bare", "empty", "think"])  # as the chat template does: only the last turn has a block
        i, c = enc.turn(user, answer, {"bare": None, "empty": "", "think": thought}[m])
        ids.extend(i)
        cls.extend(c)

    while len(ids) < length:
        left = length - len(ids)
        u = r.random()
        if left > reserve + 60 and filled < fill * len(ids) + (0.5 * fill * length if told else 0) and u < 0.6:
            want = min(left - reserve, int(loguniform(r, 40, max(60, left))))
            n = 1 if r.random() < 0.3 and told < max_facts else 0
            if n and r.random() < 0.2 and told + 1 < max_facts:
                n = 2
            told += n
            before = len(ids)
            push(d.read(int(want * CHARS_PER_TOKEN), n))
            filled += len(ids) - before
        elif left <= reserve and d.facts:
            push(d.ask() if u < 0.78 else d.ask_unknown() if u < 0.93 else d.check())
        elif told < max_facts and (not d.facts or u < 0.75):
            if free:
                t, n = d.tell_some(max_facts - told)
                push(t)
                told += n
            elif u < 0.1 and told + 2 <= max_facts:
                push(d.tell2())
                told += 2
            else:
                push(d.tell())
                told += 1
        elif d.facts and u < 0.82:
            v = r.random()
            if free and len(d.facts) <= 4 and v > 0.93:
                push(d.list())
                continue
            push(
                d.ask()
                if v < 0.55
                else d.change()
                if v < 0.68
                else d.ask_unknown()
                if v < 0.82
                else d.check()
                if v < 0.87
                else d.forget()
                if v < 0.92
                else d.list()
                if v < 0.96 and len(d.facts) <= 4
                else d.chat()
            )
        elif u < 0.9:
            push(d.chat())
        else:
            push(d.ask_unknown() if u < 0.97 else d.list() if len(d.facts) <= 4 else d.chat())
    return ids[:length], cls[:length]


def dense_row(r, enc, filler, length, vocab=None, share=0.6):
    """Many facts that are easily confused, told one after the other, and then asked for."""
    d = OpenDialogue(r, filler, vocab) if vocab is not None and r.random() < share else Dialogue(r, filler)
    mode = r.choice(["bare", "empty", "empty", "mixed"])
    ids, cls, pending = [], [], []

    def push(t):
        u, a, th = t
        i, c = enc.turn(
            u,
            a,
            {"bare": None, "empty": "", "think": th}[mode if mode != "mixed" else r.choice(["bare", "empty", "think"])],
        )
        ids.extend(i)
        cls.extend(c)

    for _ in range(r.randint(4, 9)):
        if r.random() < 0.15:
            push(d.read(r.randint(100, 400), 1))
        else:
            push(d.tell())
        if r.random() < 0.25:
            push(d.change())
    if r.random() < 0.5:
        push(d.read(r.randint(60, 500)))
    while len(ids) < length:
        if not pending:
            pending = list(d.facts)
            r.shuffle(pending)
        u = r.random()
        push(d.ask_unknown() if u < 0.12 else d.change() if u < 0.16 else d.ask(pending.pop()))
    return ids[:length], cls[:length]


def loguniform(r, lo, hi):
    return float(np.exp(r.uniform(np.log(lo), np.log(hi))))


class Rows:
    """Map-style data set: item i is the batch of training step i, a function of (seed, i) alone."""

    def __init__(self, path, schedule, seed=0, dense=0.0, open=0.0, accents=0.08):
        self.path, self.schedule, self.seed, self.dense, self.open, self.accents, self.enc = (
            path,
            schedule,
            seed,
            dense,
            open,
            accents,
            None,
        )

    def __len__(self):
        return len(self.schedule)

    def __getitem__(self, step):
        if self.enc is None:
            self.enc, self.filler, self.vocab = (
                Encoder(self.path),
                Filler("train"),
                OpenVocabulary("train", self.accents) if self.open else None,
            )
        b, t = self.schedule[step]
        ids, cls = np.empty((b, t), np.int16), np.empty((b, t), np.uint8)
        for j in range(b):
            r = random.Random(f"{self.seed}/{step}/{j}")
            if self.dense and r.random() < self.dense and t <= 2048:
                ids[j], cls[j] = dense_row(r, self.enc, self.filler, t, self.vocab)
            else:
                ids[j], cls[j] = training_row(r, self.enc, self.filler, t, self.vocab, self.open)
        return step, ids, cls
