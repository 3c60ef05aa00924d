"""One conversation: messages in, text out, and nothing read twice.

Each turn renders the whole conversation with the model's chat template, compares its tokens with those that the state
holds, goes back to the nearest checkpoint before the first difference and reads only the rest. So it does not matter
what a template does to earlier turns: most drop earlier thinking, which makes the next prompt no continuation of the last;
some insert the date. ``messages`` is the truth, and the state a cache of it: change messages as you like, at any time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from .. import budget
from ..errors import RequestError, SessionFileError
from ..generation import GenerationResponse, stream_generate
from ..model import Model
from ..state import KVOptions, ModelState
from . import files, fingerprint
from .conversation import Conversation
from .dialogue import Dialogue, Thinking
from .timeline import Timeline


@dataclass
class Piece:
    """A piece of an answer as it streams: ``kind`` is "reasoning" or "text"."""

    kind: str
    text: str
    response: GenerationResponse


@dataclass
class _Answer:
    """The newest answer as token ids, to go on from there while its message is unchanged."""

    message: dict
    prompt: list[int]
    ids: list[int]


class _Cancelled(Exception):
    pass


class Session(Conversation):
    """A conversation with a model.

    Args:
        model, tokenizer: as :func:`mlx_linattn.load` returns them.
        system: the system prompt.
        messages: earlier messages, ``{"role": ..., "content": ...}`` dicts.
        checkpoint_bytes: how much memory checkpoints may take; by default a sixteenth of the device's working set.
        memory_limit: bytes; a turn that would need more raises MemoryLimitError before it starts. By default the working set.
        max_kv_size, kv_bits, kv_group_size, quantized_kv_start: how attention keeps its context (:class:`KVOptions`).
        template: further arguments for the chat template, such as ``enable_thinking=True``.

    ``messages`` (without the system prompt) and ``system`` can be assigned at any time. A session serves one turn at a time,
    from any thread; only :meth:`cancel` may be called during a turn.

    A turn is a transaction. An error leaves messages as they were; a cancelled turn, or one whose loop was left, keeps what there
    is of its answer. Either way the state holds exactly the tokens that the timeline says.
    """

    def __init__(
        self,
        model: Model,
        tokenizer,
        system: str | None = None,
        messages: list[dict] | None = None,
        *,
        checkpoint_bytes: int | None = None,
        memory_limit: float | None = None,
        max_kv_size: int | None = None,
        kv_bits: int | None = None,
        kv_group_size: int = 64,
        quantized_kv_start: int = 0,
        **template: Any,
    ):
        self.model, self.tokenizer = model, tokenizer
        super().__init__(system, messages)
        self.memory_limit = memory_limit
        self.last: GenerationResponse | None = None  # the end of the newest answer, with its counts and speeds
        self._dialogue = Dialogue(tokenizer, template)
        options = KVOptions(max_kv_size, kv_bits, kv_group_size, quantized_kv_start)
        room = budget.checkpoint_bytes() if checkpoint_bytes is None else checkpoint_bytes
        self._timeline = Timeline(model.make_cache(options), room)
        self._answer: _Answer | None = None
        self._prints: dict[str, str] | None = None
        self._turn, self._stop = threading.Lock(), threading.Event()

    @property
    def state(self) -> ModelState:
        """What the model remembers of this conversation."""
        return self._timeline.state

    @property
    def template(self) -> dict[str, Any]:
        """Further arguments for the chat template."""
        return self._dialogue.template

    @property
    def tokens(self) -> list[int]:
        """The tokens that the state has read."""
        return list(self._timeline.tokens)

    @property
    def checkpoints(self) -> list[int]:
        """The numbers of tokens to which the state can go back."""
        return [one.position for one in self._timeline.checkpoints]

    @property
    def checkpoint_nbytes(self) -> int:
        """Bytes that the checkpoints hold, besides the state."""
        return self._timeline.checkpoint_nbytes

    def fork(self) -> Session:
        """Another session with the same past. The two share memory until they go on, each its own way."""
        twin = object.__new__(Session)
        twin.__dict__.update(self.__dict__)
        twin.messages, twin._undone = list(self.messages), list(self._undone)
        twin._timeline = self._timeline.fork()
        twin._turn, twin._stop = threading.Lock(), threading.Event()
        return twin

    def cancel(self) -> None:
        """Stop the running turn at its next token, or the next piece of its prompt. From any thread; without a turn, nothing."""
        self._stop.set()

    # Files

    def save(self, path: str | Path) -> None:
        """Write messages, tokens, state and the latest checkpoints to the file ``path``, at once or not at all.

        Raises SessionFileError where it cannot be written, RequestError where a message is not JSON or a turn is running.
        """
        with self._no_turn():
            options = self._timeline.state.options.as_dict()
            session = {"system": self.system, "messages": self.messages, "template": self.template, "options": options}
            files.write(path, session | {"undone": self._undone} | self._fingerprints(), self._timeline)

    @classmethod
    def load(
        cls, path: str | Path, model: Model, tokenizer, *, state: bool = True,
        checkpoint_bytes: int | None = None, memory_limit: float | None = None,
    ) -> Session:  # fmt: skip
        """The session that :meth:`save` wrote. ``state=False`` takes its messages only, whatever the model: the next turn reads them.

        Raises SessionFileError where the file is damaged, of a newer version, or of another model, quantization or template.
        """
        saved = files.read_session(path)
        session = cls(
            model, tokenizer, saved["system"], saved["messages"], checkpoint_bytes=checkpoint_bytes,
            memory_limit=memory_limit, **saved["options"], **saved["template"],
        )  # fmt: skip
        session._undone = [tuple(one) for one in saved["undone"]]
        if state:
            for what, own in session._fingerprints().items():
                if saved[what] != own:
                    raise SessionFileError(
                        f"{path}: was saved with {what.replace('_', ' ')}; its messages are whole: load it with state=False to keep them"
                    )
            timeline = session._timeline
            session._timeline = files.read_timeline(path, timeline.state, timeline.room)
        return session

    def _fingerprints(self) -> dict[str, str]:
        """By what to say where they differ."""
        if self._prints is None:
            self._prints = {
                "another_model_or_quantization": fingerprint.of_weights(self.model),
                "another_tokenizer_or_chat_template": fingerprint.of_tokenizer(self.tokenizer),
            }
        return self._prints

    # Turns

    @contextmanager
    def _no_turn(self) -> Iterator[None]:
        if not self._turn.acquire(blocking=False):
            raise RequestError("a turn is running: read its stream to the end, close() it, or cancel() it first")
        try:
            yield
        finally:
            self._turn.release()

    def send(self, text: str | dict | list[dict] | None = None, **options: Any) -> str:
        """The answer to ``text``, without its reasoning. Arguments as in :meth:`stream`."""
        return _text(self.stream(text, **options))

    def retry(self, **options: Any) -> str:
        """Another answer to the last question. Options as in :meth:`stream`."""
        return _text(self.stream_retry(**options))

    def continue_(self, **options: Any) -> str:
        """What follows the last answer, which was cut short or edited; the message grows by it. Options as in :meth:`stream`."""
        return _text(self.stream_continue(**options))

    def stream(self, text: str | dict | list[dict] | None = None, **options: Any) -> Iterator[Piece]:
        """Stream the answer to ``text``: a user's words; a message, or several, such as results of tools
        (``{"role": "tool", "content": ...}``); None where ``messages`` already end with the question.

        Leaving the loop early keeps the partial answer. Options: max_tokens (-1: no limit), sampler, logits_processors,
        prefill_step_size, and progress(done, total), which counts the tokens that have to be read.
        The last piece's ``response.finish_reason`` is "stop", "length" or "cancel".
        """
        new = [{"role": "user", "content": text}] if isinstance(text, str) else text or []
        base = [*self.messages, *([new] if isinstance(new, dict) else new)]
        if not base:
            raise RequestError("there is nothing to answer: give a text, or messages that end with a question")
        if base[-1].get("role") == "assistant":
            raise RequestError(
                "the conversation ends with an answer: give a text, or call continue_() to go on with it"
            )
        return self._run(base, None, **options)

    def stream_retry(self, **options: Any) -> Iterator[Piece]:
        """As :meth:`retry`, piece by piece. Until it has something, the old answer stays."""
        base = list(self.messages)
        while base and base[-1].get("role") == "assistant":
            base.pop()
        if not base:
            raise RequestError("there is nothing to retry: no question was asked yet")
        return self._run(base, None, **options)

    def stream_continue(self, **options: Any) -> Iterator[Piece]:
        """As :meth:`continue_`, piece by piece."""
        if not self.messages or self.messages[-1].get("role") != "assistant":
            raise RequestError("there is no answer to continue: the conversation does not end with one")
        return self._run(self.messages[:-1], dict(self.messages[-1]), **options)

    def _run(
        self,
        base: list[dict],
        begun: dict | None,
        *,
        max_tokens: int = -1,
        sampler: Callable | None = None,
        logits_processors: list[Callable] | None = None,
        progress: Callable[[int, int], None] | None = None,
        prefill_step_size: int | None = None,
    ) -> Iterator[Piece]:
        """The one turn: answer ``base``, going on from the answer ``begun``."""
        with self._no_turn():
            self._stop.clear()
            yield from self._transaction(
                base, begun, max_tokens, sampler, logits_processors, progress, prefill_step_size
            )

    def _transaction(self, base, begun, max_tokens, sampler, logits_processors, progress, step) -> Iterator[Piece]:
        timeline = self._timeline
        prompt, written, ends = self._tokens(base, begun)
        fed = [*prompt, *written]  # what the model is given, in order; the state holds its first state.offset tokens
        told = len(fed)
        began = time.perf_counter()
        reused = timeline.rewind(fed)
        splitter = Thinking(self.tokenizer, self._dialogue.thinks(fed), fresh=not written)
        said: dict[str, list[str]] = {"reasoning": [], "text": []}

        def report(*_) -> None:
            if self._stop.is_set():
                raise _Cancelled
            if progress:
                progress(timeline.state.offset - reused, told - reused)

        def counted(response: GenerationResponse) -> GenerationResponse:
            counts = {"reused_tokens": reused, "prefilled_tokens": told - reused, "prompt_tokens": told}
            self.last = replace(response, **counts)
            return self.last

        keep, reason = True, None
        try:
            later = max(max_tokens, 0)
            size = budget.prefill_step(self.model, timeline.state, told - reused, self.memory_limit, step, later)
            timeline.state.reserve(told + min(later, 1024))
            timeline.read(self.model, fed, ends, size, report)
            for response in stream_generate(
                self.model, self.tokenizer, fed[timeline.state.offset :], max_tokens=max_tokens, sampler=sampler,
                logits_processors=logits_processors, prompt_cache=timeline.state, prefill_step_size=size,
                prompt_progress_callback=report, memory_limit=self.memory_limit,
                written=written,
            ):  # fmt: skip
                fed.append(response.token)
                timeline.follow()
                if self._stop.is_set() and response.finish_reason is None:
                    response.finish_reason = "cancel"
                response, reason = counted(response), response.finish_reason
                kind, text = splitter.feed(response)
                said[kind].append(text)
                if text or response.finish_reason:
                    yield Piece(kind, text, response)
                if response.finish_reason == "cancel":
                    break
        except _Cancelled:
            yield Piece("text", "", counted(_nothing(time.perf_counter() - began)))
        except (GeneratorExit, KeyboardInterrupt):
            raise
        except BaseException:
            keep = False
            raise
        finally:
            timeline.settle(fed)
            if keep and (reason in ("stop", "length") or any(said["text"] + said["reasoning"])):
                self._keep(base, begun, said, prompt, fed[len(prompt) :])

    def _tokens(self, base: list[dict], begun: dict | None) -> tuple[list[int], list[int], list[int]]:
        """The prompt, the ids of the answer so far, and where messages end in them."""
        messages = [{"role": "system", "content": self.system}, *base] if self.system else base
        prompt = self._dialogue.prompt(messages)
        if not prompt:
            raise RequestError("the chat template made an empty prompt of this conversation")
        ends = self._dialogue.ends(messages, prompt)
        if begun is None:
            return prompt, [], ends
        newest = self._answer
        if newest is not None and newest.message == begun and newest.prompt == prompt:
            written = list(newest.ids)
            while written and written[-1] in self.tokenizer.eos_token_ids:
                written.pop()
        else:
            written = self._dialogue.answer_ids(prompt, begun)
        return prompt, written, [*ends, len(prompt) + len(written) - 1] if written else ends

    def _keep(self, base, begun, said, prompt, ids) -> None:
        """Keep the question and its answer, or what there is of it."""
        content, reasoning = "".join(said["text"]), "".join(said["reasoning"])
        message = dict(begun or {"role": "assistant", "content": ""})
        message["content"] = (message.get("content") or "") + content
        reasoning = (message.get("reasoning_content") or "") + reasoning
        if reasoning:
            message["reasoning_content"] = reasoning.strip("\n")
        self.messages = [*base, message]
        self._answer = _Answer(dict(message), prompt, ids)
        self._timeline.mark_end()


def _text(pieces: Iterator[Piece]) -> str:
    return "".join(piece.text for piece in pieces if piece.kind == "text")


def _nothing(seconds: float) -> GenerationResponse:
    """The response of a turn that was cancelled before its first token."""
    return GenerationResponse(
        text="", token=-1, logprobs=mx.zeros((0,)), from_draft=False, prompt_tokens=0, prompt_tps=0.0, generation_tokens=0,
        generation_tps=0.0, peak_memory=mx.get_peak_memory() / 1e9, finish_reason="cancel",
    )  # fmt: skip
