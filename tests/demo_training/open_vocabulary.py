"""Words of the second stage: attribute nouns, owners and values from open sets."""

import random
from pathlib import Path

from open_values import MAKE, UPPER
from vocabulary import NAMES, RELATIONS, pseudo, words


def word_lists():
    """Nouns, adjectives and rarer nouns (words.txt, drawn from WordNet 3.0)."""
    lines = Path(__file__).with_name("words.txt").read_text(encoding="utf-8").splitlines()
    return {line.split()[0]: line.split()[1:] for line in lines if line.strip()}


TAILS = words("""code code number number password password name name colour color address size time date pin PIN key ID id combination
price limit score level type model brand version account username login passcode token serial_number phone_number
email nickname title size weight height budget fee owner keeper manager contact location password_hint""")
FIRST = words(
    "favourite favorite favourite least_favourite lucky next last old new second first usual current preferred main secret backup"
)
ACCENTS = {
    "a": "áàäâãåā",
    "e": "éèêëę",
    "i": "íìîï",
    "o": "óòôöõøō",
    "u": "úùûü",
    "n": "ñ",
    "c": "çć",
    "s": "šś",
    "z": "žż",
    "y": "ý",
    "l": "ł",
    "r": "ř",
}


class OpenVocabulary:
    """Attribute nouns, owners and values from open sets. part: "train", or "eval" for the words that training never sees."""

    def __init__(self, part="train", accents=0.08):
        lists = word_lists()

        def split(ws):
            ws = sorted(ws)
            random.Random(11).shuffle(ws)
            n = len(ws) // 10
            return ws[n:] if part == "train" else ws[:n]

        self.nouns, self.adjs, self.rare = split(lists["nouns"]), split(lists["adjectives"]), split(lists["rare"])
        self.held, self.accents = part != "train", accents

    def noun(self, r):
        return r.choice(self.nouns if r.random() < 0.8 else self.rare)

    def any(self, r):
        u = r.random()
        if u < 0.2 * self.accents:
            return self.accent(r, r.choice(self.nouns))
        if u < 0.5:
            return r.choice(self.nouns)
        if u < 0.7:
            return r.choice(self.adjs)
        return r.choice(self.rare) if u < 0.85 else self.made_up(r)

    def made_up(self, r):
        if r.random() < 0.35:
            return pseudo(r, 1, 3)
        a, b = r.choice(self.nouns), r.choice(self.rare)
        return (a[: r.randint(1, 4)] + b[r.randint(1, max(1, len(b) - 3)) :])[:11]

    def accent(self, r, w):
        """Some letters replaced by accented ones."""
        at = [i for i, c in enumerate(w) if c.lower() in ACCENTS]
        for i in r.sample(at, min(len(at), r.choice([1, 1, 1, 2]))):
            c = r.choice(ACCENTS[w[i].lower()])
            w = w[:i] + (c.upper() if w[i].isupper() else c) + w[i + 1 :]
        return w

    def proper(self, r):
        u = r.random()
        if u < 0.3 and not self.held:
            w = r.choice(NAMES)
        else:
            w = r.choice(self.rare) if u < 0.5 else r.choice(self.nouns) if u < 0.75 else self.made_up(r)
            w = w.capitalize()
        return self.accent(r, w) if r.random() < self.accents else w

    def attribute(self, r):
        u, n = r.random(), self.noun
        if u < 0.22:
            return n(r)
        if u < 0.46:
            return n(r) + " " + n(r)
        if u < 0.58:
            return r.choice(self.adjs) + " " + n(r)
        if u < 0.63:
            return r.choice(self.adjs) + " " + n(r) + " " + n(r)
        if u < 0.76:
            return n(r) + " " + r.choice(TAILS)
        if u < 0.83:
            return r.choice(FIRST) + " " + n(r)
        if u < 0.89:
            return self.proper(r) + " " + r.choice([r.choice(TAILS), n(r)])
        if u < 0.94:
            return self.made_up(r) + r.choice(["", " " + n(r), " " + r.choice(TAILS)])
        if u < 0.97:
            return "".join(r.choice(UPPER) for _ in range(r.randint(2, 4))) + " " + r.choice(TAILS)
        return n(r) + "-" + n(r) + r.choice(["", " " + r.choice(TAILS)])

    def someone(self, r):
        u = r.random()
        if u < 0.35:
            return "my " + r.choice(RELATIONS)
        if u < 0.55:
            return "my " + self.noun(r)
        if u < 0.63:
            return "my " + r.choice(self.adjs) + " " + self.noun(r)
        if u < 0.88:
            return self.proper(r)
        if u < 0.90:
            return self.made_up(r)
        return r.choice(["the ", "our "]) + self.noun(r)

    def owner(self, r):
        u = r.random()
        if u < 0.42:
            return "my "
        if u < 0.58:
            return "the "
        if u < 0.65:
            return "our "
        return self.someone(r) + "'s "

    def value(self, kind, r):
        return MAKE[kind](self, r)
