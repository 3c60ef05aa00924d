"""From messages to token ids and from tokens back to text: chat templates, and the marks around a model's reasoning."""

from __future__ import annotations

from typing import Any

from ..errors import RequestError, TokenizerError
from ..generation import GenerationResponse
from .timeline import shared_prefix

LONGEST_TAIL = 64  # tokens of an answer's own beginning
BOUNDARIES = 8  # newest messages whose ends are looked for; each costs one rendering


class Dialogue:
    """A tokenizer's chat template with its further arguments, such as ``enable_thinking=True``."""

    def __init__(self, tokenizer, template: dict[str, Any]):
        if not tokenizer.has_chat_template:
            raise TokenizerError(
                "this model's tokenizer has no chat template: it is not a chat model; use generate() instead"
            )
        self.tokenizer, self.template = tokenizer, template

    def prompt(self, messages: list[dict]) -> list[int]:
        """The token ids of ``messages`` and of the beginning of the answer."""
        try:
            return self._render(messages, True)
        except Exception as error:  # jinja2 raises what the template asks for
            raise RequestError(f"the chat template refuses this conversation: {error}") from error

    def ends(self, messages: list[dict], prompt: list[int], newest: int = BOUNDARIES) -> list[int]:
        """Where in ``prompt`` messages end: the system prompt, the ``newest`` ones, and the last, before the answer's own
        beginning (role marker, thinking), which the next prompt may render differently."""
        first = 1 if messages and messages[0].get("role") == "system" else 0
        latest = range(max(first + 1, len(messages) - newest), len(messages) + 1)
        found = {shared_prefix(self._history(messages[:n]), prompt) for n in {first, *latest} if n}
        ends = sorted(n for n in {min(n, len(prompt) - 1) for n in found} if n > 0)
        # A template that renders every prefix differently still gets a checkpoint near its end.
        return ends if ends and len(prompt) - ends[-1] <= LONGEST_TAIL else [*ends, len(prompt) - 1]

    def _history(self, messages: list[dict]) -> list[int]:
        try:
            return self._render(messages, False)
        except Exception:
            return []  # some templates refuse a conversation that no question ends

    def _render(self, messages: list[dict], generation: bool) -> list[int]:
        return list(self.tokenizer.apply_chat_template(messages, add_generation_prompt=generation, **self.template))

    def thinks(self, tokens: list[int]) -> bool:
        """Whether ``tokens`` end inside a thought."""
        tokenizer = self.tokenizer
        if not tokenizer.has_thinking:
            return False
        return tokenizer.rfind_think_start(tokens) > tokenizer.rfind_think_end(tokens)

    def answer_ids(self, prompt: list[int], message: dict) -> list[int]:
        """An answer as the model would have written it after ``prompt``."""
        text, reasoning = message.get("content") or "", message.get("reasoning_content")
        if reasoning or (self.thinks(prompt) and text):
            opening = "" if self.thinks(prompt) else f"{self.tokenizer.think_start}\n"
            text = f"{opening}{reasoning or ''}\n{self.tokenizer.think_end}\n\n{text}"
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []


class Thinking:
    """Tells reasoning from text by the tokens that open and close it; the markers themselves are shown to nobody."""

    def __init__(self, tokenizer, inside: bool, fresh: bool = True):
        self.inside = inside
        known = tokenizer.has_thinking
        self.opening = tokenizer.think_start if known else None
        self.closing = tokenizer.think_end if known else None
        self.fresh = fresh  # drop the blank lines after a marker

    def feed(self, response: GenerationResponse) -> tuple[str, str]:
        kind, text = ("reasoning" if self.inside else "text"), response.text
        marker = self.closing if self.inside else self.opening
        if marker and marker in text:
            before, _, after = text.partition(marker)
            self.inside, self.fresh = not self.inside, True
            if before.strip():
                return kind, before
            kind, text = ("reasoning" if self.inside else "text"), after
        if self.fresh:
            text = text.lstrip("\n")
            self.fresh = not text
        return kind, text
