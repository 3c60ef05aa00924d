"""One conversation: messages in, text out, and nothing read twice.

Each turn renders the whole conversation with the model's chat template, compares its tokens with those that the state
holds, goes back to the nearest checkpoint before the first difference and reads only the rest. So it does not matter
what a template does to earlier turns: most drop earlier thinking, which makes the next prompt no continuation of the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .errors import RequestError, TokenizerError
from .generation import GenerationResponse, prefill, stream_generate
from .model import Model
from .state import ModelState, Snapshot

CHECKPOINTS = 16  # kept at most; each is as large as the recurrent state, whatever the context


@dataclass
class Piece:
    """A piece of an answer as it streams: ``kind`` is "reasoning" or "text"."""

    kind: str
    text: str
    response: GenerationResponse


@dataclass
class _Timeline:
    """Tokens read so far, the state that holds them, and the moments it can go back to."""

    state: ModelState
    tokens: list[int] = field(default_factory=list)
    checkpoints: list[Snapshot] = field(default_factory=list)

    def mark(self) -> None:
        """Remember this moment."""
        if self.checkpoints and self.checkpoints[-1].counts == self.state.counts:
            return
        self.checkpoints.append(self.state.snapshot())
        # The first one is the end of the system prompt, where every edit can start again; drop the oldest after it.
        del self.checkpoints[1:-CHECKPOINTS]

    def rewind(self, prompt: list[int]) -> None:
        """Go back until the state holds a proper prefix of ``prompt``, as long as possible."""
        common = shared_prefix(self.tokens, prompt)
        limit = min(common, len(prompt) - 1)  # one token at least has to be read, for its logits
        if len(self.tokens) <= limit:
            return
        usable = [one for one in self.checkpoints if one.counts[0] <= limit and self.state.reaches(one)]
        self.checkpoints = usable
        if usable:
            self.state.restore(usable[-1])
            del self.tokens[usable[-1].counts[0] :]
        else:
            self.state.reset()
            self.tokens.clear()

    def settle(self, fed: list[int]) -> None:
        """After reading ``fed``, or some of it: note the tokens that the state holds."""
        if self.state.offset <= len(fed):
            self.tokens = fed[: self.state.offset]
        else:  # broken off between a token's choice and its arrival here
            self.state.reset()
            self.tokens, self.checkpoints = [], []


class Session:
    """A conversation with a model.

    Args:
        model, tokenizer: as :func:`mlx_linattn.load` returns them.
        system: the system prompt.
        messages: earlier messages, ``{"role": ..., "content": ...}`` dicts.
        template: further arguments for the chat template, such as ``enable_thinking=True``.

    ``messages`` (without the system prompt) and ``system`` can be assigned at any time.
    """

    def __init__(
        self, model: Model, tokenizer, system: str | None = None, messages: list[dict] | None = None, **template: Any
    ):
        if not tokenizer.has_chat_template:
            raise TokenizerError(
                "this model's tokenizer has no chat template: it is not a chat model; use generate() instead"
            )
        self.model, self.tokenizer = model, tokenizer
        self.system, self.messages, self.template = system, list(messages or []), template
        self.last: GenerationResponse | None = None  # the end of the newest answer, with its counts and speeds
        self._timeline = _Timeline(model.make_cache())

    @property
    def state(self) -> ModelState:
        return self._timeline.state

    def clear(self) -> None:
        """Forget all messages; the system prompt stays."""
        self.messages = []

    def send(self, text: str, **options: Any) -> str:
        """The answer to ``text``, without its reasoning. Options as in :meth:`stream`."""
        return "".join(piece.text for piece in self.stream(text, **options) if piece.kind == "text")

    def stream(
        self,
        text: str,
        *,
        max_tokens: int = -1,
        sampler: Callable | None = None,
        progress: Callable[[int, int], None] | None = None,
        prefill_step_size: int = 2048,
    ) -> Iterator[Piece]:
        """Stream the answer to ``text``. Leaving the loop early keeps the partial answer in ``messages``.

        ``progress(done, total)`` counts the prompt's tokens that had to be read. Errors leave the conversation as it was.
        """
        prompt, tail = self.render([*self.messages, {"role": "user", "content": text}])
        splitter = _Thinking(self.tokenizer, self._opens_in_thought(prompt))
        answer: dict[str, list[str]] = {"reasoning": [], "text": []}
        timeline = self._timeline
        timeline.rewind(prompt)
        reused = len(timeline.tokens)
        fed = list(prompt)  # what the model has been given, in order; the state holds its first state.offset tokens

        def report(done: int, _: int) -> None:
            if progress:
                progress(timeline.state.offset - reused, len(prompt) - reused)

        try:
            for stop in self._stops(prompt, tail):
                if reused < stop:
                    prefill(self.model, prompt[timeline.state.offset : stop], timeline.state, prefill_step_size, report)
                    timeline.mark()
            for response in stream_generate(
                self.model,
                self.tokenizer,
                prompt[timeline.state.offset :],
                max_tokens=max_tokens,
                sampler=sampler,
                prompt_cache=timeline.state,
                prefill_step_size=prefill_step_size,
                prompt_progress_callback=report,
            ):
                fed.append(response.token)
                response.reused_tokens, response.prompt_tokens = reused, len(prompt)
                self.last = response
                kind, piece = splitter.feed(response)
                answer[kind].append(piece)
                if piece or response.finish_reason:
                    yield Piece(kind, piece, response)
        finally:
            timeline.settle(fed)
            self._keep(text, answer)

    def _stops(self, prompt: list[int], tail: int) -> list[int]:
        """Where to stop reading and remember the moment: the end of the system prompt, and the end of the last message."""
        head = 0
        if self.system:
            head = shared_prefix(self._ids([{"role": "system", "content": self.system}], False), prompt)
        return [head, tail] if 0 < head < tail else [tail]

    def _keep(self, text: str, answer: dict[str, list[str]]) -> None:
        """Keep the question and what there is of an answer; nothing where there is none."""
        content, reasoning = "".join(answer["text"]), "".join(answer["reasoning"])
        if not content and not reasoning:
            return
        message = {"role": "assistant", "content": content}
        if reasoning:
            message["reasoning_content"] = reasoning.strip("\n")
        self.messages += [{"role": "user", "content": text}, message]
        self._timeline.mark()

    def render(self, messages: list[dict]) -> tuple[list[int], int]:
        """The prompt's token ids, and how many of them come before the answer's own beginning (role marker, thinking)."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        prompt = self._ids([*system, *messages], True)
        history = self._ids([*system, *messages], False)
        return prompt, min(shared_prefix(history, prompt), len(prompt) - 1)

    def _ids(self, messages: list[dict], generation: bool) -> list[int]:
        try:
            return list(self.tokenizer.apply_chat_template(messages, add_generation_prompt=generation, **self.template))
        except Exception as error:  # jinja2 raises what the template asks for
            if not generation:
                return []  # some templates refuse a conversation that no question ends
            raise RequestError(f"the chat template refuses this conversation: {error}") from error

    def _opens_in_thought(self, prompt: list[int]) -> bool:
        tokenizer = self.tokenizer
        if not tokenizer.has_thinking:
            return False
        return tokenizer.rfind_think_start(prompt) > tokenizer.rfind_think_end(prompt)


class _Thinking:
    """Tells reasoning from text by the tokens that open and close it; the markers themselves are shown to nobody."""

    def __init__(self, tokenizer, inside: bool):
        self.inside = inside
        known = tokenizer.has_thinking
        self.opening = tokenizer.think_start if known else None
        self.closing = tokenizer.think_end if known else None
        self.fresh = True  # drop the blank lines after a marker

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


def shared_prefix(a: list[int], b: list[int]) -> int:
    """How many tokens two lists begin with in common."""
    for i, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return i
    return min(len(a), len(b))
