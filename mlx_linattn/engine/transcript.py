"""From an answer's tokens to events: text, reasoning and tool calls, told apart by the marks that the model sets."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from uuid import uuid4

import mlx.core as mx

from .types import Event, Reasoning, Request, Text, TokenLogprob, ToolCall

TEXT, REASONING, TOOL, END = "text", "reasoning", "tool", "end"


@dataclass
class _Known:
    """A token whose log-probability goes with the first of its characters that is shown."""

    begin: int  # its characters, counted from the answer's beginning
    end: int
    logprob: TokenLogprob


class Transcript:
    """One answer's tokens, one after the other.

    ``inside``: the answer begins in a thought.  ``marks``: look for reasoning and tool calls at all; a plain completion has none.

    A mark is shown to nobody, and neither are the blank lines around it. What may still become a mark is held back until the next
    tokens tell; so the events do not depend on where tokens begin and end. Where two marks overlap the one that is complete first
    counts.
    """

    def __init__(self, tokenizer, request: Request, inside: bool = False, marks: bool = True):
        self.stopped = False  # a stop string was said
        self.calls = 0
        self.tokens = self.reasoning_tokens = 0
        self._tokenizer, self._request = tokenizer, request
        self._detokenizer = tokenizer.detokenizer
        self._edges = _edges(tokenizer, request) if marks else {}
        self._edges.setdefault(TEXT, {}).update(dict.fromkeys(request.stop, END))
        self._trims = marks
        self._mode = REASONING if inside else TEXT
        self._fresh = marks  # nothing but blank lines since the last mark
        self._held = ""  # characters that are not decided yet
        self._at = 0  # where they begin
        self._known: deque[_Known] = deque()
        self._opening, self._call = "", ""

    def feed(self, token: int, logprobs: mx.array | None = None) -> list[Event]:
        """The events that ``token`` decides. ``logprobs`` [V], where the request asks for them."""
        self.tokens += 1
        self.reasoning_tokens += self._mode == REASONING
        self._detokenizer.add_token(token)
        text = self._detokenizer.last_segment
        if self._request.logprobs is not None:
            begin = self._at + len(self._held)
            self._known.append(_Known(begin, begin + len(text), self._logprob(token, logprobs)))
        return list(self._read(text))

    def ended(self) -> None:
        """Count the token that ended the answer, which has no text."""
        self.tokens += 1

    def finish(self) -> list[Event]:
        """The events that were held back; a tool call that was not closed counts if it can be read."""
        if self._mode == END:
            return []
        self._detokenizer.finalize()
        events = list(self._read(self._detokenizer.last_segment))
        events += self._show(len(self._held))
        if self._mode == TOOL:
            events += self._close("")
        return events

    def _read(self, text: str) -> Iterator[Event]:
        self._held += text
        while self._mode != END:
            mark, begin = self._first_mark()
            if mark is None:
                yield from self._show(len(self._held) - self._undecided())
                return
            target = self._edges[self._mode][mark]
            exact = target == END or self._mode == TOOL or not self._trims
            shown = begin if exact else len(self._held[:begin].rstrip("\n"))
            yield from self._show(shown)
            dropped = self._held[: begin - shown]
            self._drop(begin - shown + len(mark))
            if self._mode == TOOL:
                yield from self._close(mark)
            if target == TOOL:
                self._opening, self._call = dropped + mark, ""
            if target == END:
                self.stopped = True
                self._drop(len(self._held))
            self._mode, self._fresh = target, True

    def _first_mark(self) -> tuple[str | None, int]:
        """The mark that is complete first, and where it begins."""
        found = [
            (at + len(mark), at, mark) for mark in self._edges.get(self._mode, ()) if (at := self._held.find(mark)) >= 0
        ]
        _, at, mark = min(found, default=(0, 0, None))
        return mark, at

    def _undecided(self) -> int:
        """How many of the last characters may belong to a mark, or to the blank lines before one."""
        held, marks = self._held, self._edges.get(self._mode, {})
        longest = max((n for mark in marks for n in range(len(mark)) if held.endswith(mark[:n])), default=0)
        if self._trims and self._mode != TOOL and any(target != END for target in marks.values()):
            rest = held[: len(held) - longest]
            longest += len(rest) - len(rest.rstrip("\n"))
        return longest

    def _show(self, count: int) -> Iterator[Event]:
        text = self._held[:count]
        if self._mode == TOOL:
            self._call += text
            self._drop(count)
            return
        if self._fresh and self._trims:
            blank = len(text) - len(text.lstrip("\n"))
            self._drop(blank)
            text = text[blank:]
        if not text:
            return
        self._fresh = False
        self._pass(len(text))
        tokens = []
        while self._known and self._known[0].begin < self._at:
            tokens.append(self._known.popleft().logprob)
        yield (Reasoning if self._mode == REASONING else Text)(text, tuple(tokens))

    def _drop(self, count: int) -> None:
        """Pass characters that are shown to nobody."""
        self._pass(count)
        while self._known and self._known[0].begin < self._at and self._known[0].end <= self._at:
            self._known.popleft()

    def _pass(self, count: int) -> None:
        self._held, self._at = self._held[count:], self._at + count

    def _close(self, closing: str) -> Iterator[Event]:
        """The call whose text is complete; what no parser understands is text, as it was said."""
        try:
            parsed = self._tokenizer.tool_parser(self._call, self._request.tools)
            calls = [_call(one) for one in (parsed if isinstance(parsed, list) else [parsed])]
        except Exception:  # the model's words decide what a parser meets
            calls = []
        if calls:
            self.calls += len(calls)
            yield from calls
        elif self._opening:
            yield Text(self._opening + self._call + closing)
        self._opening, self._call = "", ""

    def _logprob(self, token: int, logprobs: mx.array) -> TokenLogprob:
        def text(one: int) -> str:
            return self._tokenizer.decode([one])

        count = self._request.logprobs
        best = mx.argpartition(-logprobs, count - 1)[:count].tolist() if count else []
        own, *values = logprobs[mx.array([token, *best])].tolist()
        top = sorted(zip(values, best), reverse=True)
        return TokenLogprob(token, text(token), own, tuple((one, text(one), value) for value, one in top))


def _edges(tokenizer, request: Request) -> dict[str, dict[str, str]]:
    """{mode: {mark: the mode after it}}."""
    edges: dict[str, dict[str, str]] = {TEXT: {}, REASONING: {}, TOOL: {}}
    if tokenizer.has_thinking:
        edges[TEXT][tokenizer.think_start] = REASONING
        edges[REASONING][tokenizer.think_end] = TEXT
    for mark in getattr(tokenizer, "structural_markers", ()):
        edges[TEXT][mark] = TEXT
    if request.tools and tokenizer.has_tool_calling:
        edges[TEXT][tokenizer.tool_call_start] = TOOL
        if tokenizer.has_thinking:
            edges[REASONING][tokenizer.tool_call_start] = TOOL
        if tokenizer.tool_call_end:  # some formats end with the answer
            edges[TOOL][tokenizer.tool_call_end] = TEXT
    return edges


def _call(parsed: dict) -> ToolCall:
    name, arguments = parsed["name"], parsed.get("arguments", {})
    if not isinstance(name, str) or not name:
        raise ValueError("a call without a name")
    if isinstance(arguments, str):  # some formats hold JSON in a string
        json.loads(arguments)
    else:
        arguments = json.dumps(arguments, ensure_ascii=False)
    identity = parsed.get("id")
    return ToolCall(identity if isinstance(identity, str) and identity else f"call_{uuid4().hex[:24]}", name, arguments)
