"""From a request to the tokens that the model reads; what makes no sense is refused here."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import Any

from ..errors import ContextLengthError, RequestError, TokenizerError
from ..generation import encode
from ..session.dialogue import Dialogue
from .types import Request

NEWEST = 1  # messages before the last whose ends become checkpoints, beside the system prompt


@dataclass(frozen=True)
class Prompt:
    """tokens: what is read.  ends: where in them messages end.  thinks: the answer begins in a thought.

    chat: made by the chat template, so that the answer has the template's marks.
    """

    tokens: list[int]
    ends: list[int]
    thinks: bool
    chat: bool


def as_request(request: Request | Sequence[dict] | str, changes: dict[str, Any]) -> Request:
    """A checked request; a text is a user's message."""
    if isinstance(request, str):
        request = Request(messages=[{"role": "user", "content": request}])
    elif not isinstance(request, Request):
        request = Request(messages=list(request))
    if unknown := changes.keys() - {one.name for one in fields(Request)}:
        raise RequestError(f"a request has no {', '.join(sorted(unknown))}; see Request for what it has")
    request = replace(request, **changes)
    if isinstance(request.stop, str):
        request = replace(request, stop=(request.stop,))
    if request.logit_bias:
        request = replace(request, logit_bias={int(token): float(x) for token, x in request.logit_bias.items()})
    return request


def check(request: Request, vocabulary: int) -> None:
    """Raises RequestError for a request that no model of so many tokens could answer."""

    def require(holds: bool, what: str) -> None:
        if not holds:
            raise RequestError(what)

    require((request.messages is None) != (request.prompt is None), "give either messages or a prompt")
    require(request.messages is None or len(request.messages) > 0, "messages is empty: give at least a user's message")
    require(request.max_tokens > 0 or request.max_tokens == -1, f"max_tokens is {request.max_tokens}, expected a positive number, or -1 for no limit")  # fmt: skip
    require(
        all(isinstance(one, str) and one for one in request.stop),
        "stop holds something that is no text, or an empty one",
    )
    require(request.temp >= 0, f"temp is {request.temp}, expected 0 or more")
    for name in ("top_p", "min_p"):
        require(0 <= getattr(request, name) <= 1, f"{name} is {getattr(request, name)}, expected 0 to 1")
    require(0 <= request.top_k < vocabulary, f"top_k is {request.top_k}, expected 0 to {vocabulary - 1}")
    require(request.repetition_penalty is None or request.repetition_penalty >= 0, f"repetition_penalty is {request.repetition_penalty}, expected 0 or more")  # fmt: skip
    require(request.logprobs is None or 0 <= request.logprobs <= vocabulary, f"logprobs is {request.logprobs}, expected 0 to {vocabulary}")  # fmt: skip
    for token in request.logit_bias or ():
        require(0 <= token < vocabulary, f"logit_bias names token {token}; the model has {vocabulary}")


class Renderer:
    """A tokenizer that several threads may use: one after the other, as transformers' do not say that they can do otherwise."""

    def __init__(self, tokenizer, vocabulary: int, max_context: int | None):
        self.tokenizer, self.vocabulary, self.max_context = tokenizer, vocabulary, max_context
        self._lock = threading.Lock()

    def prompt(self, request: Request) -> Prompt:
        with self._lock:
            prompt = self._plain(request) if request.messages is None else self._chat(request)
        if not prompt.tokens:
            raise RequestError("the prompt is empty: give at least one token")
        most = self.max_context
        if most is not None and len(prompt.tokens) >= most:
            raise ContextLengthError(
                f"the prompt has {len(prompt.tokens):,} tokens; prompt and answer together can have {most:,}: shorten it"
            )
        return prompt

    def _chat(self, request: Request) -> Prompt:
        if not self.tokenizer.has_chat_template:
            raise TokenizerError("this model's tokenizer has no chat template, so it takes no messages: give a prompt")
        tools = {"tools": request.tools} if request.tools else {}
        dialogue = Dialogue(self.tokenizer, {**request.template, **tools})
        tokens = dialogue.prompt(request.messages)
        if not tokens:
            raise RequestError("the chat template made an empty prompt of these messages")
        return Prompt(tokens, dialogue.ends(request.messages, tokens, NEWEST), dialogue.thinks(tokens), True)

    def _plain(self, request: Request) -> Prompt:
        tokens = encode(self.tokenizer, request.prompt)
        for token in tokens:
            if not isinstance(token, Integral) or not 0 <= token < self.vocabulary:
                raise RequestError(f"the prompt holds {token!r}, which is none of the model's {self.vocabulary} tokens")
        return Prompt([int(token) for token in tokens], [len(tokens) - 1] if len(tokens) > 1 else [], False, False)
