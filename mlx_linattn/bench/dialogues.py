"""Conversations that tell something, go on about other things for a while, and ask for it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

KINDS = {
    "needle": "told once",
    "overwritten": "told, then changed; the new value counts",
    "multi-key": "one of four that differ in the owner only",
}
OWNERS = ("my", "my sister's", "my brother's", "my neighbour's", "Tom's", "Anna's", "my manager's", "my cousin's")
NAMES = tuple("Pepper Momo Biscuit Luna Rusty Clover Ziggy Hazel Pippin Shadow Maple Basil Juniper Otto Willow".split())
COLOURS = tuple("red green blue yellow purple orange white black brown silver".split())
WORDS = tuple(
    "anchor basket candle garden hammer island jacket ladder mirror needle orchard pencil rocket saddle".split()
)
VALUES: dict[str, Callable[[random.Random], str]] = {
    "locker code": lambda draw: str(draw.randrange(1000, 10000)),
    "cat's name": lambda draw: draw.choice(NAMES),
    "dog's name": lambda draw: draw.choice(NAMES),
    "favourite colour": lambda draw: draw.choice(COLOURS),
    "password": lambda draw: draw.choice(WORDS) + str(draw.randrange(10, 100)),
    "room number": lambda draw: str(draw.randrange(100, 1000)),
}
READ, HAVE_READ = "Please read this:\n", "I have read it."


@dataclass(frozen=True)
class Dialogue:
    """The messages that tell, the question, and the value that a right answer contains."""

    kind: str
    told: tuple[dict, ...]
    question: str
    value: str


def dialogue(kind: str, seed: int) -> Dialogue:
    """The same one for the same seed, in every mode and for every model."""
    draw = random.Random(f"{kind} {seed}")
    thing = draw.choice(sorted(VALUES))
    owners = draw.sample(OWNERS, 4 if kind == "multi-key" else 1)
    values: list[str] = []
    while len(values) < max(len(owners), 2):
        value = VALUES[thing](draw)
        if value not in values:
            values.append(value)
    told = [message for owner, value in zip(owners, values) for message in _statement(owner, thing, value)]
    asked = draw.randrange(len(owners))
    value = values[asked]
    if kind == "overwritten":
        value = values[1]
        told += _change(owners[0], thing, value)
    return Dialogue(kind, tuple(told), f"What is {owners[asked]} {thing}?", value)


def _statement(owner: str, thing: str, value: str) -> list[dict]:
    return _exchange(
        f"{owner[0].upper()}{owner[1:]} {thing} is {value}.", f"Noted: {_yours(owner)} {thing} is {value}."
    )


def _change(owner: str, thing: str, value: str) -> list[dict]:
    return _exchange(f"Actually, {owner} {thing} is now {value}.", f"Updated: {_yours(owner)} {thing} is now {value}.")


def _yours(owner: str) -> str:
    return "your" + owner[2:] if owner.startswith("my") else owner


def _exchange(said: str, answered: str) -> list[dict]:
    return [{"role": "user", "content": said}, {"role": "assistant", "content": answered}]


def page(text: str) -> list[dict]:
    """A piece of something else to read."""
    return _exchange(READ + text, HAVE_READ)


SUBJECTS = tuple(
    "gardener,old clerk,captain,second engineer,young painter,baker,miller,travelling tailor,quiet judge,cook".split(
        ","
    )
)
VERBS = tuple(
    "carried,repaired,measured,painted,forgot,sold,described,counted,folded,borrowed,opened,washed".split(",")
)
THINGS = tuple(
    "a wooden boat,three maps,the long letter,a copper kettle,two lamps,the broken clock,a sack of flour,some rope".split(
        ","
    )
)
PLACES = tuple(
    "near the harbour,behind the mill,on the hill,in the market,under the bridge,at the station,by the river".split(",")
)
TIMES = tuple(
    "before the rain came,late in the evening,without a word,for the third time,early in spring,as usual".split(",")
)


def prose(seed: int) -> Iterator[str]:
    """Plain sentences without end, of a closed vocabulary, with a year here and there to be mistaken for something."""
    draw = random.Random(f"prose {seed}")
    while True:
        year = f"In {draw.randrange(1700, 2000)}, the" if draw.random() < 0.2 else "The"
        yield " ".join([year, *(draw.choice(words) for words in (SUBJECTS, VERBS, THINGS, PLACES, TIMES))]) + "."


def sentences_of(text: str, seed: int) -> Iterator[str]:
    """The paragraphs of a text of one's own, over and over, from a place that depends on the seed."""
    paragraphs = [one for one in text.split("\n") if one.strip()]
    start = random.Random(f"text {seed}").randrange(len(paragraphs))
    while True:
        yield from paragraphs[start:]
        start = 0
