"""Long texts that a user pastes: made-up sentences, structured blocks, and documentation and code of Python's library."""

import ast
import json
import os
import re
import sysconfig
from pathlib import Path

from vocabulary import CITIES, DAYS, NAMES, VALUES, cap, words

NOUN = words("""river house garden letter window machine road bridge forest lamp teacher captain market
ship train table book song city village winter summer question answer story picture stone cloud field
mountain engine signal paper door mirror candle kitchen clock bottle coat island harbour tower valley
student farmer doctor painter baker sailor soldier neighbour stranger crowd wagon basket ladder blanket
theory experiment measurement result problem method reason idea language history museum library council
committee report budget contract meeting project plan schedule factory office customer product price
storm wind rain snow sun moon star planet animal bird horse dog fish tree flower leaf root seed bread
cheese apple soup coffee tea salt sugar knife spoon plate glass hammer nail wheel rope sail anchor""")
ADJ = words("""old new small large quiet loud bright dark narrow wide cold warm heavy light slow quick
careful strange simple early late green blue grey wooden broken empty full distant nearby famous unknown
patient curious honest clever tired happy serious gentle rough smooth deep shallow ancient modern local
foreign useful important ordinary remarkable beautiful dusty wet dry sharp round flat long short thick""")
VERB = words("""opened closed carried watched followed found lost repaired painted moved visited described
built sold bought borrowed remembered ignored measured counted cleaned washed lifted dropped crossed
reached left entered praised examined drew copied covered discovered changed protected inspected""")
VERB2 = words("""waited slept laughed walked ran worked stopped returned disappeared arrived hesitated
listened agreed smiled travelled rested argued nodded answered whispered remained""")
ADV = words("""slowly quickly quietly carefully often rarely suddenly finally usually always never again
already together alone nearby almost certainly perhaps mostly partly""")
PREP = words("near behind under above beside inside outside across beyond around")
CONJ = ["because", "although", "while", "when", "after", "before", "until", "so that", "as if", "even though"]
OPEN = [
    "In the morning",
    "Later that day",
    "In {y}",
    "For many years",
    "On {dy}",
    "After a while",
    "According to {nm}",
    "At {t}",
    "During the {n}",
    "In {c}",
    "As a rule",
    "In other words",
    "For example",
    "However",
    "Meanwhile",
    "At first",
    "In the end",
    "Every {dy}",
    "About {q} years ago",
    "With {q} {a} {n}s",
]
SENT = [
    "The {a} {n} {v} the {n} {pr} the {n}.",
    "{nm} {v} a {a} {n} and {v2} {av}.",
    "{o}, the {n} {v2}.",
    "{o}, {nm} {v} the {a} {n}.",
    "There was a {a} {n} {pr} the {n}, {cj} the {n} {v2} {av}.",
    "Nobody in {c} {v} the {n} {cj} the {n}s were {a}.",
    "The {n} of the {n} is {a} and {a}.",
    "It {av} {v2} {cj} {nm} {v} the {n}.",
    "{o}, {q} {n}s were {v} by the {n}.",
    "The {n} cost {q} euros, which was {a} for a {n} in {c}.",
    "{nm} and {nm} {v2} {pr} the {a} {n}.",
    '"The {n} is {a}," said {nm}, "and the {n} is not."',
    "Most {n}s are {a}, but this {n} was {av} {a}.",
    "If the {n} is {a}, the {n} should be {v} {av}.",
    "{o}, a {n} of {q} {n}s {v2} {pr} {c}.",
    "Why {nm} {v} the {n} is not known.",
    "The {a} {n} had {q} {n}s, {q} {n}s and a {n}.",
    "A {n} can be {a}; a {n} is {av} {a}.",
    "{nm} asked whether the {n} {v2}.",
    "They {v} the {n}, {v} the {n} and {v2}.",
    "What the {n} {v} was a {a} {n}.",
    "It is {av} said that {n}s are {a}.",
    "Between {c} and {c} the {n} is {a}.",
    "{nm}, a {a} {n} from {c}, {v} the {n} {av}.",
    "The {n} was {v} in {y} {cj} the {n} {v2}.",
    "This {n} has no {n}.",
    "We {v} {q} of the {n}s {pr} the {n}.",
    "You should {av} have {v} the {n}.",
    "I {v2} {pr} the {n} {cj} it was {a}.",
]
SLOT = re.compile(r"\{(\w+)\}")


def sentence(r):
    def fill(m):
        k = m.group(1)
        if k == "n":
            return r.choice(NOUN)
        if k == "a":
            return r.choice(ADJ)
        if k == "v":
            return r.choice(VERB)
        if k == "v2":
            return r.choice(VERB2)
        if k == "av":
            return r.choice(ADV)
        if k == "pr":
            return r.choice(PREP)
        if k == "cj":
            return r.choice(CONJ)
        if k == "nm":
            return r.choice(NAMES)
        if k == "c":
            return r.choice(CITIES)
        if k == "q":
            return str(int(10 ** r.uniform(0.3, 4)))
        if k == "y":
            return str(r.randint(1700, 2030))
        if k == "dy":
            return r.choice(DAYS)
        if k == "t":
            return VALUES["time"](r)
        if k == "o":
            return SLOT.sub(fill, r.choice(OPEN))
        raise KeyError(k)

    return cap(SLOT.sub(fill, r.choice(SENT)))


def synthetic_paragraph(r):
    return " ".join(sentence(r) for _ in range(r.randint(3, 12)))


def structured_block(r):
    u = r.random()
    n = r.randint(4, 25)
    if u < 0.25:
        return "\n".join(
            f"- {r.choice(ADJ)} {r.choice(NOUN)}" + (f": {r.randint(0, 9999)}" if r.random() < 0.5 else "")
            for _ in range(n)
        )
    if u < 0.45:
        return "\n".join(
            f"{r.randint(0, 23):02d}:{r.randint(0, 59):02d}:{r.randint(0, 59):02d} {r.choice(['INFO', 'WARN', 'DEBUG', 'ERROR'])} "
            f"{r.choice(NOUN)} {r.choice(VERB)} {r.choice(NOUN)} {r.randint(0, 99999)}"
            for _ in range(n)
        )
    if u < 0.6:
        return json.dumps(
            {
                r.choice(NOUN): r.choice([r.randint(0, 9999), r.choice(NOUN), r.choice(NAMES), None, True])
                for _ in range(n)
            },
            indent=r.choice([None, 2]),
        )
    if u < 0.75:
        cols = r.randint(2, 5)
        return "\n".join(
            ", ".join(
                r.choice([str(r.randint(0, 9999)), r.choice(NAMES), r.choice(CITIES), r.choice(NOUN)])
                for _ in range(cols)
            )
            for _ in range(n)
        )
    if u < 0.9:
        return "\n".join(f"{i + 1}. {sentence(r)}" for i in range(min(n, 10)))
    lo, hi = r.choice([(0x430, 0x44F), (0x3B1, 0x3C9), (0x4E00, 0x4FFF), (0xE0, 0xFF), (0x3041, 0x3093)])
    return " ".join("".join(chr(r.randint(lo, hi)) for _ in range(r.randint(2, 7))) for _ in range(n))


def generic_text():
    """Ordinary English and code: documentation strings and sources of the standard library of the Python that runs this."""
    prose, code = [], []
    try:
        from pydoc_data.topics import topics

        for t in topics.values():
            prose += [p for p in re.split(r"\n\s*\n", t) if len(p) > 120]
    except ImportError:
        pass
    std = sysconfig.get_paths()["stdlib"]
    for root, dirs, files in os.walk(std):
        dirs[:] = sorted(
            d
            for d in dirs
            if d
            not in (
                "test",
                "tests",
                "site-packages",
                "dist-packages",
                "idlelib",
                "lib2to3",
                "__pycache__",
                "encodings",
                "pydoc_data",
            )
        )
        for name in sorted(files):
            if not name.endswith(".py"):
                continue
            try:
                src = Path(root, name).read_text(encoding="utf-8")
                tree = ast.parse(src)
            except (SyntaxError, UnicodeDecodeError, ValueError):
                continue
            for node in ast.walk(tree):
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                    doc = ast.get_docstring(node)
                    if doc and len(doc) > 120:
                        prose += [p for p in re.split(r"\n\s*\n", doc) if len(p) > 120]
            lines = src.split("\n")
            for i in range(0, len(lines) - 40, 160):
                code.append("\n".join(lines[i : i + 30]))
    prose = [re.sub(r"[ \t]*\n[ \t]*", " ", p).strip() if i % 3 else p for i, p in enumerate(prose)]
    return prose, code


class Filler:
    def __init__(self, part="train"):
        prose, code = generic_text()
        # every tenth paragraph is kept for evaluation
        keep = (lambda i: i % 10 != 0) if part == "train" else (lambda i: i % 10 == 0)
        self.prose = [p for i, p in enumerate(prose) if keep(i)]
        self.code = [p for i, p in enumerate(code) if keep(i)]

    def blocks(self, r, chars, mix=None):
        """About `chars` characters of passage, as a list of paragraphs."""
        out, n = [], 0
        mix = mix or r.choice([(0.45, 0.8, 0.88), (0.9, 1.0, 1.0), (0.05, 0.97, 0.99), (0.2, 0.4, 0.7)])
        while n < chars:
            u = r.random()
            if u < mix[0]:
                p = synthetic_paragraph(r)
            elif u < mix[1]:
                p = r.choice(self.prose)
            elif u < mix[2]:
                p = r.choice(self.code)
            else:
                p = structured_block(r)
            if n + len(p) > chars + 40:
                p = p[: max(20, chars - n)].rsplit(" ", 1)[0]
            p = p.replace("<|", "< |").strip() or "..."
            out.append(p)
            n += len(p) + 2
        return out

    def passage(self, r, chars, needles=()):
        blocks = self.blocks(r, chars)
        for s in needles:
            i = r.randrange(len(blocks))
            if r.random() < 0.5 and ". " in blocks[i]:
                parts = blocks[i].split(". ")
                j = r.randrange(1, len(parts))
                blocks[i] = ". ".join(parts[:j]) + ". " + s + " " + ". ".join(parts[j:])
            else:
                blocks.insert(i, s)
        return r.choice(["\n\n", "\n\n", "\n"]).join(blocks)
