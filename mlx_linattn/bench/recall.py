"""What a model still knows of what it was told, by how much it has read since, and what bounded memory costs.

One conversation serves all distances: between two questions it only reads on, and after each answer it goes back
(:class:`mlx_linattn.Session`), so that nothing is read twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from .. import Session
from ..state import KVOptions
from .dialogues import Dialogue, page

PAGE = 800  # tokens of one message at most
FRAME = 12  # tokens that a chat template puts around the two messages of a page, about
SMALLEST = 24  # tokens that are worth a page


@dataclass(frozen=True)
class Answer:
    """distance: tokens between what was told and the question, as asked for; right: whether the value is in the answer."""

    mode: str
    kind: str
    distance: int
    seed: int
    right: bool
    answer: str
    value: str


def ask(
    model, tokenizer, talk: Dialogue, sentences: Iterator[str], distances: Sequence[int], options: KVOptions, *,
    mode: str, seed: int, max_tokens: int, limit: float | None, template: dict, progress: Callable[[int], None],
) -> Iterator[Answer]:  # fmt: skip
    """The answers to one dialogue's question, greedy, at each of the rising distances."""
    chat = Session(model, tokenizer, messages=list(talk.told), memory_limit=limit, **options.as_dict(), **template)
    between = 0
    for distance in distances:
        while distance - between >= SMALLEST:
            messages, tokens = _page(tokenizer, sentences, min(PAGE, distance - between))
            chat.messages = [*chat.messages, *messages]
            between += tokens
        answer = chat.send(talk.question, max_tokens=max_tokens)
        chat.undo()
        progress(distance)
        yield Answer(mode, talk.kind, distance, seed, is_right(answer, talk.value), answer, talk.value)


def _page(tokenizer, sentences: Iterator[str], room: int) -> tuple[list[dict], int]:
    """A page of about ``room`` tokens, and how many it has; the last sentence is cut where it would be much longer."""
    text, used = "", len(_encode(tokenizer, page("")[0]["content"] + page("")[1]["content"])) + FRAME
    while used < room:
        sentence = (" " if text else "") + next(sentences)
        ids = _encode(tokenizer, sentence)
        if used + len(ids) > room:
            sentence = tokenizer.decode(ids[: room - used])
            ids = ids[: room - used]
        text, used = text + sentence, used + len(ids)
    return page(text), used


def _encode(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def is_right(answer: str, value: str) -> bool:
    """The exact value, not as a part of something longer."""
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", answer) is not None


def scores(answers: Sequence[Answer]) -> dict[tuple[str, str, int], tuple[int, int]]:
    """(mode, kind, distance) -> (right, asked)."""
    counts: dict[tuple[str, str, int], tuple[int, int]] = {}
    for one in answers:
        right, asked = counts.get((one.mode, one.kind, one.distance), (0, 0))
        counts[one.mode, one.kind, one.distance] = (right + one.right, asked + 1)
    return counts


def cells(answers: Sequence[Answer]) -> list[dict]:
    """The scores as flat records."""
    return [
        {"mode": mode, "kind": kind, "distance": distance, "right": right, "asked": asked}
        for (mode, kind, distance), (right, asked) in scores(answers).items()
    ]


def as_dicts(answers: Sequence[Answer]) -> list[dict]:
    return [asdict(one) for one in answers]
