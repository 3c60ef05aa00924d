"""Dialogues of the first stage, with keys and values of closed lists."""

import re

from passages import NOUN
from phrases import ASK, CHANGE, CHAT, CHECK, FORGET, HAVE_READ, LIST, NEEDLE, READ, SELF, SELF_BY_KEY, TELL, UNKNOWN
from vocabulary import ANIMALS, CITIES, FOODS, SPORTS, VALUES, cap, draw_key, pseudo, yours


class Dialogue:
    """Plays both sides. Every method returns (user text, assistant text, thought)."""

    def __init__(
        self,
        r,
        filler,
        keys=draw_key,
        tell=TELL,
        ask=ASK,
        change=CHANGE,
        forget=FORGET,
        needle=NEEDLE,
        casual=True,
        use_self=True,
    ):
        self.r, self.filler, self.draw = r, filler, keys
        self.T, self.A, self.C, self.F, self.N = tell, ask, change, forget, needle
        self.facts, self.meta, self.gone, self.casual, self.use_self = {}, {}, [], casual, use_self

    def style(self, s):
        r = self.r
        if not self.casual:
            return s
        if r.random() < 0.10:
            s = s[:1].lower() + s[1:]
        if r.random() < 0.12 and s[-1] in ".?!":
            s = s[:-1]
        return s

    def fmt(self, t, key, val, prep):
        return t.format(k=key, K=cap(key), v=prep + val, b=val)

    def new_key(self):
        r = self.r
        for _ in range(50):
            u = r.random()
            if self.use_self and u < 0.10:
                s = r.choice(SELF)
                key, kind, prep = s[:3]
            elif u < 0.35 and self.facts:  # near miss of a known key
                known = r.choice(list(self.facts))
                other, kind2, prep2 = self.draw(r)
                kind, prep = self.meta[known]
                if r.random() < 0.5:  # same attribute, other owner
                    a = re.sub(r"^(my \w+'s |my best friend's |our |my |\w+'s |the \w+'s )", "", known)
                    o = re.match(r"^(my \w+'s |my best friend's |our |my |\w+'s |the \w+'s )", other)
                    key = (o.group(0) if o else "my ") + a
                else:  # same owner, other attribute
                    o = re.match(r"^(my \w+'s |my best friend's |our |my |\w+'s |the \w+'s )", known)
                    a = re.sub(r"^(my \w+'s |my best friend's |our |my |\w+'s |the \w+'s )", "", other)
                    key, kind, prep = (o.group(0) if o else "my ") + a, kind2, prep2
            else:
                key, kind, prep = self.draw(r)
            if yours(key) not in [yours(k) for k in self.facts]:
                return key, kind, prep
        return key + " at work", kind, prep

    def add(self, key, kind, prep, val=None):
        val = val or self.value(kind)
        for k in [k for k in self.facts if yours(k) == yours(key)]:
            del self.facts[k]
        self.facts[key] = val
        self.meta[key] = (kind, prep)
        return val

    def value(self, kind):
        return VALUES[kind](self.r)

    def tell(self):
        r = self.r
        key, kind, prep = self.new_key()
        val = self.add(key, kind, prep)
        t = r.choice(self.T)
        if self.use_self and key in SELF_BY_KEY and r.random() < 0.6:
            t = r.choice(SELF_BY_KEY[key][3])
        y = yours(key)
        return (
            self.style(self.fmt(t, key, val, prep)),
            f"Noted: {y} is {prep}{val}.",
            f"The user tells me a fact.\nStore: {y} = {val}",
        )

    def tell2(self):
        k1, kind1, p1 = self.new_key()
        v1 = self.add(k1, kind1, p1)
        k2, kind2, p2 = self.new_key()
        v2 = self.add(k2, kind2, p2)
        t = self.r.choice(
            [
                "{K} is {v} and {k2} is {v2}.",
                "{K} is {v}. {K2} is {v2}.",
                "Two things: {k} is {v}, and {k2} is {v2}.",
                "Remember that {k} is {v} and that {k2} is {v2}.",
            ]
        )
        u = t.format(k=k1, K=cap(k1), v=p1 + v1, k2=k2, K2=cap(k2), v2=p2 + v2)
        y1, y2 = yours(k1), yours(k2)
        return (
            self.style(u),
            f"Noted: {y1} is {p1}{v1}. {cap(y2)} is {p2}{v2}.",
            f"The user tells me two facts.\nStore: {y1} = {v1}; {y2} = {v2}",
        )

    def change(self, key=None):
        key = key or self.r.choice(list(self.facts))
        kind, prep = self.meta[key]
        old = self.facts[key]
        val = VALUES[kind](self.r)
        while val == old:
            val = VALUES[kind](self.r)
        self.facts[key] = val  # keeps its place in the list
        y = yours(key)
        return (
            self.style(self.fmt(self.r.choice(self.C), key, val, prep)),
            f"Updated: {y} is now {prep}{val}.",
            f"The user changes a fact.\nStore: {y} = {val}",
        )

    def ask(self, key=None):
        r = self.r
        key = key or r.choice(list(self.facts))
        _kind, prep = self.meta[key]
        t = r.choice(self.A)
        if self.use_self and key in SELF_BY_KEY and r.random() < 0.6:
            t = r.choice(SELF_BY_KEY[key][4])
        y, val = yours(key), self.facts[key]
        return (
            self.style(t.format(k=key, K=cap(key))),
            f"{cap(y)} is {prep}{val}.",
            f"The user asks for {y}.\nMy notes say: {val}",
        )

    def ask_unknown(self):
        gone = [k for k in self.gone if k not in self.facts]
        if gone and self.r.random() < 0.5:
            key = self.r.choice(gone)
        else:
            key, _kind, _prep = self.new_key()
        y = yours(key)
        return (
            self.style(self.r.choice(self.A).format(k=key, K=cap(key))),
            UNKNOWN,
            f"The user asks for {y}.\nMy notes say: nothing",
        )

    def forget(self, key=None):
        r = self.r
        t = r.choice(self.F)
        if key is None and (not self.facts or r.random() < 0.15):
            key, _, _ = self.new_key()
            return (
                self.style(t.format(k=key, K=cap(key))),
                UNKNOWN,
                f"The user wants me to forget {yours(key)}.\nMy notes say: nothing",
            )
        key = key or r.choice(list(self.facts))
        del self.facts[key]
        self.gone.append(key)
        y = yours(key)
        return (
            self.style(t.format(k=key, K=cap(key))),
            f"Done. I forgot {y}.",
            f"The user wants me to forget {y}.\nRemove it",
        )

    def list(self):
        if self.facts:
            items = "; ".join(f"{yours(k)} is {self.meta[k][1]}{v}" for k, v in self.facts.items())
            return (
                self.style(self.r.choice(LIST)),
                f"I remember: {items}.",
                "The user asks for all facts.\nRead out the notes",
            )
        return (
            self.style(self.r.choice(LIST)),
            "I don't remember any facts yet.",
            "The user asks for all facts.\nMy notes say: nothing",
        )

    def check(self):
        r = self.r
        key = r.choice(list(self.facts))
        kind, prep = self.meta[key]
        val = self.facts[key]
        guess = val if r.random() < 0.5 else VALUES[kind](r)
        y = yours(key)
        u = self.fmt(r.choice(CHECK), key, guess, prep)
        return (
            self.style(u),
            f"{'Yes' if guess == val else 'No'}, {y} is {prep}{val}.",
            f"The user asks for {y}.\nMy notes say: {val}",
        )

    def chat(self):
        r = self.r
        us, a = r.choice(CHAT)
        u = r.choice(us)
        u = (
            u.replace("{n}", r.choice(NOUN))
            .replace("{c}", r.choice(CITIES))
            .replace("{d}", str(r.randint(2, 99)))
            .replace("{s}", r.choice(SPORTS))
            .replace("{w}", pseudo(r).capitalize())
            .replace("{a}", r.choice(ANIMALS))
            .replace("{f}", r.choice(FOODS))
        )
        return self.style(u), a, "No fact is needed here."

    def read(self, chars, n_needles=0):
        r = self.r
        needles = []
        for _ in range(n_needles):
            key, kind, prep = self.new_key()
            val = self.add(key, kind, prep)
            needles.append(self.fmt(r.choice(self.N), key, val, prep))
        p = self.filler.passage(r, max(60, chars), needles)
        return r.choice(READ).replace("{p}", p), HAVE_READ, "The user gives me a text to read."
