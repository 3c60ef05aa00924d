"""Tool calls through an engine: the template gets the tools, the events the calls."""

from __future__ import annotations

import json

import mlx.core as mx
import pytest

import mlx_linattn as la

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]  # fmt: skip
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture(scope="module")
def engine():
    """The demo, which was not trained for tools, with the parser that mlx_lm has for Qwen's."""
    model, tokenizer = la.load("demo", tokenizer_config={"tool_parser_type": "json_tools"})
    with la.Engine((model, tokenizer)) as engine:
        yield engine


def says(tokenizer, text):
    """A sampler of exactly this text and the end."""
    ids = iter([*tokenizer.encode(text, add_special_tokens=False), *[tokenizer.eos_token_id] * 3])
    return lambda _: mx.array([next(ids)])


def test_calls_have_ids_and_the_answer_says_why_it_ended(engine):
    said = f"I look.\n{CALL}\n{CALL}"
    events = list(engine.submit("How is it in Rome?", tools=TOOLS, sampler=says(engine.tokenizer, said)))
    calls = [event for event in events if isinstance(event, la.ToolCall)]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("weather", {"city": "Rome"})] * 2
    assert len({call.id for call in calls}) == 2
    assert "".join(event.text for event in events if isinstance(event, la.Text)) == "I look."
    assert events[-1].finish_reason == "tool_calls"
    answer = engine.answer("How is it in Rome?", tools=TOOLS, sampler=says(engine.tokenizer, said))
    assert answer.message["content"] == "I look."
    assert [call["function"]["name"] for call in answer.message["tool_calls"]] == ["weather"] * 2


def test_a_malformed_call_is_text(engine):
    said = "<tool_call>\n{nonsense\n</tool_call>"
    answer = engine.answer("How is it?", tools=TOOLS, sampler=says(engine.tokenizer, said))
    assert (answer.text, answer.tool_calls, answer.done.finish_reason) == (said, (), "stop")


def test_a_call_that_is_cut_off_is_text(engine):
    answer = engine.answer("How is it?", tools=TOOLS, sampler=says(engine.tokenizer, CALL), max_tokens=8)
    assert answer.done.finish_reason == "length" and not answer.tool_calls and answer.text.startswith("<tool_call>\n{")


def test_the_template_sees_the_tools(engine, monkeypatch):
    seen = []
    render = type(engine.tokenizer).apply_chat_template

    def watched(self, *args, **kwargs):
        seen.append(kwargs.get("tools"))
        return render(self, *args, **kwargs)

    monkeypatch.setattr(type(engine.tokenizer), "apply_chat_template", watched)
    engine.answer("Hello.", tools=TOOLS, max_tokens=1)
    assert seen and all(tools == TOOLS for tools in seen)
