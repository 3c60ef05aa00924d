"""From the engine's events to OpenAI's objects: a whole answer, or a chunk for each event."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from .. import __version__
from ..engine.types import Done, Event, Reasoning, Text, TokenLogprob, ToolCall
from .requests import Asked

FINGERPRINT = f"mlx-linattn-{__version__}"
REASONS = {"cancel": "stop"}  # of an answer that was ended on purpose, after its first tool call


class Reply:
    """One answer on its way out."""

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, asked: Asked, model: str):
        self.asked = asked
        self.head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model,
            "system_fingerprint": FINGERPRINT,
        }  # fmt: skip
        self.calls = 0  # tool calls so far

    def note(self, event: Event) -> None:
        """Count ``event``, before it is written."""
        self.calls += isinstance(event, ToolCall)

    def enough(self) -> bool:
        """Whether nothing that may still come belongs to the answer."""
        return self.calls > 0 and not self.asked.tool_calls_at_once

    def first(self) -> list[dict]:
        """The chunks before any event."""
        return []

    def chunk(self, event: Event) -> list[dict]:
        """The chunks of one event, none for some."""
        if isinstance(event, Done):
            last = [self._chunk({}, finish_reason=self._reason(event))]
            usage = [{**self._chunk({}), "choices": [], "usage": usage_of(event)}] if self.asked.include_usage else []
            return [*last, *usage]
        delta = self._delta(event)
        return [] if delta is None else [self._chunk(*delta)]

    def whole(self, events: Sequence[Event]) -> dict:
        """All of an answer; the last event is its Done."""
        done = events[-1]
        choice = {"index": 0, **self._choice(events[:-1]), "finish_reason": self._reason(done)}
        return {**self.head, "object": self.whole_object, "choices": [choice], "usage": usage_of(done)}

    def _reason(self, done: Done) -> str:
        return "tool_calls" if self.enough() else REASONS.get(done.finish_reason, done.finish_reason)

    def _chunk(self, content: dict, logprobs: dict | None = None, finish_reason: str | None = None) -> dict:
        choice = {"index": 0, **self._content(content), "logprobs": logprobs, "finish_reason": finish_reason}
        usage = {"usage": None} if self.asked.include_usage else {}
        return {**self.head, "object": self.chunk_object, "choices": [choice], **usage}

    def _content(self, content: dict) -> dict:
        raise NotImplementedError

    def _delta(self, event: Event) -> tuple[dict, dict | None] | None:
        raise NotImplementedError

    def _choice(self, events: Sequence[Event]) -> dict:
        raise NotImplementedError


class ChatReply(Reply):
    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def first(self) -> list[dict]:
        return [self._chunk({"role": "assistant", "content": ""})]

    def _content(self, content):
        return {"delta": content}

    def _delta(self, event):
        if isinstance(event, Text):
            return {"content": event.text}, _logprobs(self.asked, event.logprobs)
        if isinstance(event, Reasoning):
            return {"reasoning_content": event.text}, None
        if isinstance(event, ToolCall):
            return {"tool_calls": [{"index": self.calls - 1, **_call(event)}]}, None
        return None

    def _choice(self, events):
        message: dict[str, Any] = {"role": "assistant", "content": _joined(events, Text), "refusal": None}
        if reasoning := _joined(events, Reasoning):
            message["reasoning_content"] = reasoning
        if calls := [_call(event) for event in events if isinstance(event, ToolCall)]:
            message["tool_calls"] = calls
            message["content"] = message["content"] or None
        tokens = [one for event in events if isinstance(event, Text) for one in event.logprobs]
        return {"message": message, "logprobs": _logprobs(self.asked, tokens)}


class TextReply(Reply):
    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, asked: Asked, model: str):
        super().__init__(asked, model)
        self.offset = 0  # of the next token's text

    def _content(self, content):
        return {"text": content.get("text", "")}

    def _delta(self, event):
        return ({"text": event.text}, self._tokens(event.logprobs)) if isinstance(event, Text) else None

    def _choice(self, events):
        tokens = [one for event in events if isinstance(event, Text) for one in event.logprobs]
        return {"text": _joined(events, Text), "logprobs": self._tokens(tokens)}

    def _tokens(self, tokens: Sequence[TokenLogprob]) -> dict | None:
        """Log-probabilities in the older interface's form."""
        if self.asked.request.logprobs is None:
            return None
        offsets = []
        for one in tokens:
            offsets.append(self.offset)
            self.offset += len(one.text)
        return {
            "tokens": [one.text for one in tokens],
            "token_logprobs": [one.logprob for one in tokens],
            "top_logprobs": [{text: logprob for _, text, logprob in one.top} for one in tokens],
            "text_offset": offsets,
        }


def usage_of(done: Done) -> dict:
    """Counts of tokens, with what was reused of the prompt and thought before the answer."""
    usage = done.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.reused_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def _joined(events: Sequence[Event], kind: type) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


def _call(event: ToolCall) -> dict:
    return {"id": event.id, "type": "function", "function": {"name": event.name, "arguments": event.arguments}}


def _logprobs(asked: Asked, tokens: Sequence[TokenLogprob]) -> dict | None:
    if asked.request.logprobs is None:
        return None
    return {
        "content": [
            {
                **_logprob(one.text, one.logprob),
                "top_logprobs": [_logprob(text, logprob) for _, text, logprob in one.top],
            }
            for one in tokens
        ],
        "refusal": None,
    }


def _logprob(text: str, logprob: float) -> dict:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
