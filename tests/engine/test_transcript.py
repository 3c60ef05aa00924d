"""Tokens become text, reasoning and tool calls in the same way wherever one token ends and the next begins."""

from __future__ import annotations

import json
from itertools import pairwise

import mlx.core as mx
import pytest
from helpers import MLX_LM
from hypothesis import given
from hypothesis import strategies as st

from mlx_linattn.engine.transcript import Transcript
from mlx_linattn.engine.types import Reasoning, Request, Text, ToolCall
from mlx_linattn.interop.door import mlx_lm

TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}}
]


class Pieces:
    """A tokenizer whose token i is the i-th of some pieces of text."""

    has_thinking, think_start, think_end = True, "<think>", "</think>"
    structural_markers = ("<|open|>",)

    def __init__(self, pieces: list[str], parser: str = "json_tools"):
        self.pieces = pieces
        module = mlx_lm(f"tool_parsers.{parser}")
        self.has_tool_calling, self.tool_parser = True, module.parse_tool_call
        self.tool_call_start, self.tool_call_end = module.tool_call_start, module.tool_call_end
        self.last_segment = ""

    @property
    def detokenizer(self):
        return self

    def add_token(self, token):
        self.last_segment = self.pieces[token]

    def finalize(self):
        self.last_segment = ""

    def decode(self, ids):
        return "".join(self.pieces[i] for i in ids)


def tell(pieces, inside=False, marks=True, parser="json_tools", **fields):
    """The transcript, and its events in runs: [("text", ...), ("reasoning", ...), (name, arguments)]."""
    transcript = Transcript(Pieces(pieces, parser), Request(**{"tools": TOOLS, **fields}), inside, marks)
    events = []
    for token in range(len(pieces)):
        if not transcript.stopped:
            events += transcript.feed(token, mx.zeros((len(pieces),)))
    events += transcript.finish()
    runs: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, ToolCall):
            runs.append((event.name, event.arguments))
            continue
        assert event.text, "an event without text"
        kind = {Text: "text", Reasoning: "reasoning"}[type(event)]
        if runs and runs[-1][0] == kind:
            runs[-1] = kind, runs[-1][1] + event.text
        else:
            runs.append((kind, event.text))
    return transcript, runs, events


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.mark.parametrize(
    "said, inside, runs",
    [
        ("Hello.", False, [("text", "Hello.")]),
        ("\n\nHello.\n", False, [("text", "Hello.\n")]),
        ("Hm.\n</think>\n\nHello.", True, [("reasoning", "Hm."), ("text", "Hello.")]),
        ("<think>\nHm.\n</think>\n\nHello.", False, [("reasoning", "Hm."), ("text", "Hello.")]),
        ("a <b> </think> c", False, [("text", "a <b> </think> c")]),
        ("Hm. <thi", True, [("reasoning", "Hm. <thi")]),
        ("<|open|>Hello.", False, [("text", "Hello.")]),
        (f"Wait.\n{CALL}", False, [("text", "Wait."), ("weather", '{"city": "Rome"}')]),
        (f"Hm.\n</think>\n{CALL}\n{CALL}", True, [("reasoning", "Hm."), *[("weather", '{"city": "Rome"}')] * 2]),
        (f"Hm.\n{CALL}", True, [("reasoning", "Hm."), ("weather", '{"city": "Rome"}')]),
        ("<tool_call>{oops}</tool_call> so", False, [("text", "<tool_call>{oops}</tool_call> so")]),
        ('<tool_call>{"arguments": {}}</tool_call>', False, [("text", '<tool_call>{"arguments": {}}</tool_call>')]),
        ('<tool_call>{"name": "wea', False, [("text", '<tool_call>{"name": "wea')]),
    ],
)
def test_what_is_what(said, inside, runs):
    for pieces in ([said], list(said), [said[i : i + 5] for i in range(0, len(said), 5)]):
        assert tell(pieces, inside)[1] == runs


MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "\n", "<", "ab", "abc", "c", '{"name": "f"}', "<|open|>"]


@given(st.lists(st.sampled_from(MARKS), max_size=12), st.booleans(), st.booleans(), st.randoms())
def test_the_cut_into_tokens_does_not_matter(words, inside, marks, random):
    said = "".join(words)
    cuts = sorted({0, len(said), *(random.randint(0, len(said)) for _ in range(6))})
    pieces = [said[a:b] for a, b in pairwise(cuts)]
    fields = {"stop": ["abc", "c<"]}
    whole, want, _ = tell(list(said), inside, marks, **fields)
    got, runs, _ = tell(pieces, inside, marks, **fields)
    assert runs == want
    assert (got.stopped, got.calls) == (whole.stopped, whole.calls)


@pytest.mark.skipif(MLX_LM < (0, 32), reason="earlier parsers of mlx_lm read another format of Mistral's")
def test_two_calls_in_a_format_without_an_end():
    said = '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}'
    _, runs, events = tell(list(said), parser="mistral")
    assert runs == [("weather", '{"city": "Rome"}'), ("weather", '{"city": "Oslo"}')]
    assert len({event.id for event in events}) == 2


def test_a_format_of_tags():
    said = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
    assert tell(list(said), parser="qwen3_coder")[1] == [("weather", '{"city": "Rome"}')]


def test_without_tools_a_call_is_text():
    assert tell([CALL], tools=None)[1] == [("text", CALL)]


def test_a_plain_completion_has_no_marks():
    said = f"\n<think>{CALL}"
    assert tell(list(said), marks=False)[1] == [("text", said)]


@pytest.mark.parametrize("stop", ["d", "cd", "bcd", "abcd", "\nd"])
def test_a_stop_string_and_what_follows_it_is_never_shown(stop):
    said = f"ab\nabc{stop} and more"
    want = said[: said.index(stop)]
    for pieces in ([said], list(said), [said[i : i + 3] for i in range(0, len(said), 3)]):
        transcript, runs, events = tell(pieces, stop=[stop, "never"])
        assert transcript.stopped
        assert runs == [("text", want)]
        assert all(want.startswith("".join(e.text for e in events[:n])) for n in range(len(events)))


def test_what_could_become_a_stop_string_is_shown_in_the_end():
    transcript, runs, _ = tell(list("abab"), stop=["abc"])
    assert runs == [("text", "abab")] and not transcript.stopped


def test_stop_strings_are_not_looked_for_in_reasoning():
    assert tell(["no</think>", "yes, no"], inside=True, stop=["no"])[1] == [("reasoning", "no"), ("text", "yes, ")]


def test_every_shown_token_has_its_probability_once():
    pieces = ["<think>", "Hm", ".", "</think>", "\n\nY", "e", "", "s ab", "c", " more"]
    transcript, _, events = tell(pieces, stop=["bc"], logprobs=2)
    assert transcript.stopped and transcript.tokens == 9 and transcript.reasoning_tokens == 3
    known = [(type(event).__name__, [one.token for one in event.logprobs]) for event in events]
    flat = [token for _, tokens in known for token in tokens]
    assert flat == [1, 2, 4, 5, 6, 7], "tokens of marks and of the stop string have none"
    assert known[0][0] == "Reasoning" and known[-1][0] == "Text"
    assert all(len(one.top) == 2 and one.logprob == 0.0 for event in events for one in event.logprobs)


def test_arguments_are_json_text():
    for arguments, want in (({"city": "Köln"}, '{"city": "Köln"}'), ('{"city": 1}', '{"city": 1}')):
        said = "<tool_call>" + json.dumps({"name": "weather", "arguments": arguments}) + "</tool_call>"
        assert tell([said])[1] == [("weather", want)]
