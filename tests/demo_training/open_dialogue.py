"""Dialogues of the second stage, with keys and values from open sets."""

import re

from dialogue import Dialogue
from open_phrases import (
    ABOUT,
    ABOUT_ME,
    ABOUT_ME_BY_KEY,
    FACTS_HEAD,
    HELD_ASK,
    HELD_CHANGE,
    HELD_FORGET,
    HELD_NEEDLE,
    HELD_TELL,
    JOIN,
    JOIN_HEAD,
    OPEN_ASK,
    OPEN_CHANGE,
    OPEN_LIST,
    OPEN_TELL,
    PLURAL,
)
from open_values import WEIGHTS
from phrases import ASK, CHANGE, CHECK, FORGET, NEEDLE, TELL, UNKNOWN
from vocabulary import COLOURS, VALUES, cap, draw_key, yours


class OpenDialogue(Dialogue):
    """The same game with keys and values from open sets, more ways of saying things, and several things in one message."""

    def __init__(self, r, filler, vocab, old=0.2, about=0.22, known_values=False, known_keys=False, held=False, **kw):
        t = {
            "tell": TELL + OPEN_TELL * 2,
            "ask": ASK + OPEN_ASK,
            "change": CHANGE + OPEN_CHANGE,
            "forget": FORGET,
            "needle": [*NEEDLE, "{K} is {v}.", "btw {k} is {v}."],
        }
        if held:
            t = {
                "tell": HELD_TELL,
                "ask": HELD_ASK,
                "change": HELD_CHANGE,
                "forget": HELD_FORGET,
                "needle": HELD_NEEDLE,
            }
        super().__init__(r, filler, **{**t, **kw})
        self.o, self.old, self.about, self.held = vocab, old, about, held
        self.known_values, self.known_keys = known_values, known_keys
        self.parts, self.subject, self.verb = {}, {}, {}

    def value(self, kind):
        r = self.r
        if kind == "age":
            return str(r.randint(1, 99))
        if kind.startswith("="):  # of training's closed lists
            return VALUES[kind[1:]](r)
        if kind == "colour":
            return r.choice(COLOURS) if r.random() < 0.5 and not self.o.held else self.o.any(r)
        return self.o.value(kind, r)

    def draw_kind(self):
        r = self.r
        if self.known_values:
            return "=" + r.choice(list(VALUES)), ""
        kind = r.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        if kind == "known":
            kind = "=" + r.choice(list(VALUES))
        prep = ""
        if kind in ("time", "=time") and r.random() < 0.3:
            prep = "at "
        if kind == "=date" and r.random() < 0.3:
            prep = "on "
        return kind, prep

    def new_key(self):
        r = self.r
        for _ in range(50):
            u = r.random()
            kind, prep = self.draw_kind()
            subject, verb = None, "is"
            if self.known_keys or u < self.old:
                key, k, p = draw_key(r)
                if self.known_values or (r.random() < 0.5 and not self.known_keys):
                    kind, prep = "=" + k, p
                m = re.match(r"^(my best friend's |my \w+'s |our |my |the \w+'s |\w+'s |the )", key)
                owner, attr = (m.group(0), key[m.end() :]) if m else ("my ", key)
            elif u < self.old + self.about:
                if r.random() < 0.4:
                    key, kind = r.choice(ABOUT_ME)[:2]
                    owner, attr, prep = "my ", key[3:], ""
                else:
                    x = self.o.someone(r)
                    i = r.choices(range(len(ABOUT)), [5, 2, 1.5, 1, 1, 1])[0]
                    attr, kind, prep, owner, subject = ABOUT[i][0], ABOUT[i][1], "", x + "'s ", (x, i)
                if self.known_values:
                    kind = {
                        "proper": "=name",
                        "place": "=city",
                        "age": "=number",
                        "date": "=date",
                        "colour": "=colour",
                    }.get(kind, "=word")
            elif u < self.old + self.about + 0.18 and self.facts:  # near miss of a known key
                known = r.choice(list(self.facts))
                owner, attr = self.parts[known]
                v = r.random()
                if v < 0.45:
                    owner, verb = self.o.owner(r), self.verb.get(known, "is")
                elif v < 0.8 or " " not in attr:
                    attr = self.o.attribute(r)
                else:
                    w = attr.split(" ")
                    w[r.randrange(len(w))] = self.o.noun(r)
                    attr = " ".join(w)
            else:
                owner, attr = self.o.owner(r), self.o.attribute(r)
                if r.random() < 0.05 and owner in ("my ", "the ", "our "):
                    verb = "are"
                    attr += "es" if attr.endswith(("s", "x", "h")) else "s"
                elif r.random() < 0.03:
                    owner, attr = "the ", self.o.noun(r) + " of " + self.o.someone(r)
            key = owner + attr
            if yours(key) not in [yours(k) for k in self.facts] and yours(key) not in [yours(k) for k in self.gone]:
                break
        else:
            key = key + " at work"
        self.parts[key], self.verb[key] = (owner, attr), verb
        if subject:
            self.subject[key] = subject
        else:
            self.subject.pop(key, None)
        return key, kind, prep

    def style(self, s, t=""):
        r = self.r
        if not self.casual or t.startswith("{b}"):
            return s
        if r.random() < 0.12:
            s = s[:1].lower() + s[1:] if not re.match(r"[A-Z]\w*'s |[A-Z][A-Z]", s) else s
        if r.random() < 0.12 and s[-1] in ".?!":
            s = s[:-1]
        return s

    def fmt(self, t, key, val, prep):
        r = self.r
        if self.verb.get(key) == "are":
            for a, b in PLURAL:
                t = re.sub(a, b, t)
        k, big = key, cap(key)
        attr = self.parts.get(key, ("", ""))[1]
        if key.startswith("the ") and attr[:1].islower() and key == "the " + attr and r.random() < 0.2 and self.casual:
            k = attr
            big = cap(k) if r.random() < 0.4 else k
        return t.format(k=k, K=big, v=prep + val, b=val)

    def is_(self, key, prep, val, y=None):
        return f"{y or yours(key)} {self.verb.get(key, 'is')} {prep}{val}"

    def clause(self, key, val, prep):
        """A statement without its full stop, beginning in lower case."""
        r = self.r
        if key in self.subject and r.random() < 0.8:
            x, i = self.subject[key]
            return r.choice(ABOUT[i][2]).format(x=x, b=val)
        if key in ABOUT_ME_BY_KEY and r.random() < 0.75:
            return r.choice(ABOUT_ME_BY_KEY[key][2]).format(b=val)
        return self.fmt(r.choice(["{k} is {v}"] * 6 + ["{k} = {b}"]), key, val, prep)

    def tell(self, key=None):
        key, kind, prep = self.new_key()
        val = self.add(key, kind, prep)
        y = yours(key)
        return (
            self.statement(key, val, prep),
            f"Noted: {self.is_(key, prep, val)}.",
            f"The user tells me a fact.\nStore: {y} = {val}",
        )

    def statement(self, key, val, prep):
        r = self.r
        if (key in self.subject or key in ABOUT_ME_BY_KEY) and r.random() < 0.75:
            s = self.clause(key, val, prep)
            m = re.match(r"my ([\w ]+) is (called|named) (.*)", s)
            if m and r.random() < 0.3:
                s = f"I have a {m.group(1)} {m.group(2)} {m.group(3)}"
            openings = [""] * 5 + ["Hi! ", "btw ", "Remember that ", "By the way, ", "Hello, ", "FYI, ", "Note that "]
            s = r.choice(openings) + s
            return self.style(cap(s) + r.choice([".", ".", ".", "", "!"]))
        t = r.choice(self.T)
        return self.style(self.fmt(t, key, val, prep), t)

    def tell2(self):
        r = self.r
        k1, kind1, p1 = self.new_key()
        v1 = self.add(k1, kind1, p1)
        k2, kind2, p2 = self.new_key()
        v2 = self.add(k2, kind2, p2)
        c1, c2 = self.clause(k1, v1, p1), self.clause(k2, v2, p2)
        s = r.choice(JOIN).replace("{1}", c1).replace("{2+}", cap(c2)).replace("{2}", c2)
        s = r.choice(JOIN_HEAD) + s
        y1, y2 = yours(k1), yours(k2)
        return (
            self.style(cap(s) + r.choice([".", ".", ".", "", "!"])),
            f"Noted: {self.is_(k1, p1, v1)}. {cap(self.is_(k2, p2, v2))}.",
            f"The user tells me two facts.\nStore: {y1} = {v1}; {y2} = {v2}",
        )

    def tell_list(self, n):
        """Several facts as a list."""
        r = self.r
        keys = []
        for _ in range(n):
            k, kind, p = self.new_key()
            keys.append((k, self.add(k, kind, p), p))
        bullet, sep = r.choice(["- ", "* ", "", "{}. "]), r.choice([": ", " = ", " is "])
        lines = [
            bullet.format(i + 1)
            + (self.fmt("{k}" + sep + "{b}", k, v, p) if sep != " is " else self.fmt("{K} is {v}", k, v, p))
            + ("." if sep == " is " and bullet != "- " else "")
            for i, (k, v, p) in enumerate(keys)
        ]
        s = "\n".join(([h] if (h := r.choice(FACTS_HEAD)) else []) + lines)
        facts = ". ".join(cap(self.is_(k, p, v)) if i else self.is_(k, p, v) for i, (k, v, p) in enumerate(keys))
        return (
            s,
            f"Noted: {facts}.",
            "The user tells me some facts.\nStore: " + "; ".join(f"{yours(k)} = {v}" for k, v, _ in keys),
        )

    def tell_ask(self, two=False):
        """One or two facts and a question in one message: the question is answered."""
        r = self.r
        before = set(self.facts)
        s, _, th = self.tell2() if two else self.tell()
        new = [k for k in self.facts if k not in before] or list(self.facts)[-1:]
        u = r.random()
        if u < 0.1:
            q, a, th2 = self.ask_unknown()
        else:
            q, a, th2 = self.ask(r.choice(list(self.facts)) if u < 0.25 else r.choice(new))
        if s[-1] not in ".!?":
            s += r.choice([".", ".", ",", "\n"])
        return s + r.choice([" ", " ", " ", "\n", " So "]).replace("So ", "Now: ") + q, a, th + "\n" + th2

    def tell_some(self, room):
        """(turn, number of facts)"""
        u = self.r.random()
        if u < 0.14:
            return self.tell_ask(), 1
        if u < 0.18 and room > 1:
            return self.tell_ask(True), 2
        if u < 0.36 and room > 1:
            return self.tell2(), 2
        if u < 0.44 and room > 1:
            n = self.r.randint(2, min(4, room))
            return self.tell_list(n), n
        return self.tell(), 1

    def change(self, key=None):
        key = key or self.r.choice(list(self.facts))
        kind, prep = self.meta[key]
        old = self.facts[key]
        val = self.value(kind)
        while val == old:
            val = self.value(kind)
        self.facts[key] = val
        y = yours(key)
        t = self.r.choice(self.C)
        return (
            self.style(self.fmt(t, key, val, prep), t),
            f"Updated: {y} {self.verb.get(key, 'is')} now {prep}{val}.",
            f"The user changes a fact.\nStore: {y} = {val}",
        )

    def question(self, key, kind="", prep=""):
        r = self.r
        if key in self.subject and r.random() < 0.6:
            x, i = self.subject[key]
            return self.style(r.choice(ABOUT[i][3]).format(x=x))
        if key in ABOUT_ME_BY_KEY and r.random() < 0.6:
            return self.style(r.choice(ABOUT_ME_BY_KEY[key][3]))
        t = r.choice(self.A)
        if kind == "where" and r.random() < 0.5:
            t = r.choice(["Where is {k}?", "where is {k}?", "Where is {k} again?"])
        if (prep or kind in ("time", "date")) and r.random() < 0.3:
            t = r.choice(["When is {k}?", "when is {k}?"])
        return self.style(self.fmt(t, key, "", ""), t)

    def ask(self, key=None):
        key = key or self.r.choice(list(self.facts))
        kind, prep = self.meta[key]
        y, val = yours(key), self.facts[key]
        return (
            self.question(key, kind, prep),
            f"{cap(self.is_(key, prep, val))}.",
            f"The user asks for {y}.\nMy notes say: {val}",
        )

    def ask_unknown(self):
        gone = [k for k in self.gone if k not in self.facts]
        if gone and self.r.random() < 0.5:
            key = self.r.choice(gone)
        else:
            key, _kind, _prep = self.new_key()
        return self.question(key), UNKNOWN, f"The user asks for {yours(key)}.\nMy notes say: nothing"

    def forget(self, key=None):
        r = self.r
        t = r.choice(self.F)
        if key is None and (not self.facts or r.random() < 0.15):
            key, _, _ = self.new_key()
            return (
                self.style(self.fmt(t, key, "", "")),
                UNKNOWN,
                f"The user wants me to forget {yours(key)}.\nMy notes say: nothing",
            )
        key = key or r.choice(list(self.facts))
        del self.facts[key]
        self.gone.append(key)
        return (
            self.style(self.fmt(t, key, "", "")),
            f"Done. I forgot {yours(key)}.",
            f"The user wants me to forget {yours(key)}.\nRemove it",
        )

    def list(self):
        q = self.style(self.r.choice(OPEN_LIST))
        if self.facts:
            items = "; ".join(self.is_(k, self.meta[k][1], v) for k, v in self.facts.items())
            return q, f"I remember: {items}.", "The user asks for all facts.\nRead out the notes"
        return q, "I don't remember any facts yet.", "The user asks for all facts.\nMy notes say: nothing"

    def check(self):
        r = self.r
        key = r.choice(list(self.facts))
        kind, prep = self.meta[key]
        val = self.facts[key]
        guess = val if r.random() < 0.5 else self.value(kind)
        u = self.fmt(r.choice(CHECK), key, guess, prep)
        return (
            self.style(u),
            f"{'Yes' if guess == val else 'No'}, {self.is_(key, prep, val)}.",
            f"The user asks for {yours(key)}.\nMy notes say: {val}",
        )
