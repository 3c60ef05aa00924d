"""What goes into an engine and what comes out: requests, events, and how they are counted. Plain data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Request:
    """One answer to be made. Either ``messages``, for the model's chat template, or ``prompt``, as it is.

    messages: ``{"role": ..., "content": ...}`` dicts.  tools: functions as OpenAI's API describes them; calls are
        recognized where mlx_lm has a parser for the model's format.
    template: further arguments for the chat template, such as ``{"enable_thinking": True}``.
    prompt: text, or token ids.
    max_tokens: -1 is no limit.  stop: strings that end the answer's text (not its reasoning); they are not part of it.
    temp, top_p, min_p, top_k, logit_bias, repetition_penalty, presence_penalty, frequency_penalty: as in mlx_lm.
    seed: the same seed gives the same answer, whatever else the engine does meanwhile.
    logprobs: for each token, the log-probabilities of the so many likeliest; 0: of the token alone; None: of none.
    sampler, logits_processors: as in mlx_lm, instead of, and after, those that the numbers above ask for. They are called in the
        engine's thread: arrays that they bring along must be evaluated. What they raise ends this answer alone.
    """

    messages: list[dict] | None = None
    prompt: str | Sequence[int] | None = None
    tools: list[dict] | None = None
    template: dict[str, Any] = field(default_factory=dict)
    max_tokens: int = -1
    stop: Sequence[str] = ()
    temp: float = 0.0
    top_p: float = 0.0
    min_p: float = 0.0
    top_k: int = 0
    logit_bias: dict[int, float] | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    logprobs: int | None = None
    sampler: Callable | None = None
    logits_processors: Sequence[Callable] = ()


@dataclass(frozen=True)
class TokenLogprob:
    """One token of an answer: its id, text and log-probability, and the likeliest alternatives as (id, text, log-probability)."""

    token: int
    text: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()


@dataclass(frozen=True)
class Progress:
    """``done`` of ``total`` prompt tokens that no checkpoint covered are read."""

    done: int
    total: int


@dataclass(frozen=True)
class Text:
    """A piece of the answer."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Reasoning:
    """A piece of what the model thinks before its answer."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class ToolCall:
    """The model asks for a function; ``arguments`` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Usage:
    """Tokens. ``reused_tokens`` of the ``prompt_tokens`` came from a checkpoint; the others were read."""

    prompt_tokens: int
    reused_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0


@dataclass(frozen=True)
class Timing:
    """Seconds: waiting in the queue, reading the prompt, and making the answer after its first token."""

    queued: float
    prefill: float
    decode: float


@dataclass(frozen=True)
class Done:
    """The end of an answer. ``finish_reason`` is "stop", "length", "tool_calls" or "cancel"."""

    finish_reason: str
    usage: Usage
    timing: Timing


Event = Progress | Text | Reasoning | ToolCall | Done


@dataclass(frozen=True)
class Answer:
    """All of an answer. ``logprobs`` are those of its text, where they were asked for."""

    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    done: Done
    logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, to be appended to the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message
