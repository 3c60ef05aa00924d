"""A plug-in for Simon Willison's ``llm``: its conversations are sessions here, so that each turn reads only what is new.

    llm linattn add mlx-community/Qwen3.5-4B-4bit
    llm chat -m linattn/mlx-community/Qwen3.5-4B-4bit

Nothing but ``llm`` loads this file, and it loads a model only when one is asked.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click
import llm
from pydantic import Field

if TYPE_CHECKING:
    from ..session import Session

PREFIX = "linattn/"
LIST = "linattn.json"  # in llm's folder: the models that were added
PARTS = ("TextPart", "ReasoningPart")  # of a message that a template can take
KEPT = 4  # conversations whose states are kept


@llm.hookimpl
def register_models(register) -> None:
    """The demo, and the models that were added with ``llm linattn add``."""
    for name in ("demo", *added()):
        register(LinAttnModel(name))


@llm.hookimpl
def register_commands(cli) -> None:
    @cli.group("linattn")
    def group():
        """Linear-attention hybrid models that run on this machine, by mlx-linattn"""

    @group.command("add")
    @click.argument("model")
    def add(model: str):
        """Let llm know MODEL, a folder or a Hub id; it is loaded, and downloaded, when it is first asked"""
        _write([*(name for name in added() if name != model), model])
        click.echo(f"Ask it with: llm -m {PREFIX}{model} 'your question'")

    @group.command("remove")
    @click.argument("model")
    def remove(model: str):
        """Let llm forget MODEL; its files stay"""
        if model not in added():
            raise click.ClickException(f"{model} was not added (added: {', '.join(added()) or 'none'})")
        _write([name for name in added() if name != model])


def added() -> list[str]:
    """The models that were added."""
    try:
        names = json.loads((llm.user_dir() / LIST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        click.echo(f"{llm.user_dir() / LIST} is not a JSON list of models; delete it and add them again", err=True)
        return []
    return names


def _write(names: list[str]) -> None:
    (llm.user_dir() / LIST).write_text(json.dumps(names, indent=1), encoding="utf-8")


class LinAttnModel(llm.Model):
    """One model; it is loaded with its first prompt and stays."""

    can_stream = True

    class Options(llm.Options):
        max_tokens: int | None = Field(description="Longest answer, in tokens", default=None, ge=1)
        temperature: float | None = Field(description="Sampling temperature; 0 is greedy", default=None, ge=0)
        top_p: float | None = Field(description="Nucleus sampling", default=None, gt=0, le=1)
        min_p: float | None = Field(description="Least probability relative to the best", default=None, ge=0, le=1)
        top_k: int | None = Field(description="Sample from the best K", default=None, ge=0)
        seed: int | None = Field(description="The same seed gives the same answer", default=None)

    def __init__(self, name: str):
        self.name, self.model_id = name, PREFIX + name
        self._loaded: tuple[Any, Any] | None = None
        self._sessions: OrderedDict[str, Session] = OrderedDict()

    def execute(self, prompt, stream, response, conversation) -> Iterator:
        """Reasoning and text as they come; what the session holds of the conversation already is not read again."""
        try:
            from llm.parts import StreamEvent
        except ImportError as error:
            raise llm.ModelError("mlx-linattn needs llm 0.32 or newer: pip install -U llm") from error
        from ..errors import LinAttnError

        try:
            session, options = self._session(conversation), prompt.options
            system, session.messages = _messages(prompt.messages)
            session.system = system or None
            pieces = session.stream(sampler=_sampler(options), max_tokens=options.max_tokens or -1)
            for piece in pieces:
                if piece.text and not (piece.kind == "reasoning" and prompt.hide_reasoning):
                    yield StreamEvent(type=piece.kind, chunk=piece.text)
        except LinAttnError as error:
            raise llm.ModelError(str(error)) from error
        last = session.last
        details = {"prompt_tokens_details": {"cached_tokens": last.reused_tokens}}
        response.set_usage(input=last.prompt_tokens, output=last.generation_tokens, details=details)
        response.response_json = {
            "finish_reason": last.finish_reason,
            "reused_tokens": last.reused_tokens,
            "prompt_tps": round(last.prompt_tps, 1),
            "generation_tps": round(last.generation_tps, 1),
            "peak_memory_gb": round(last.peak_memory, 3),
        }

    def _session(self, conversation) -> Session:
        """The conversation's own, or a fresh one."""
        import mlx_linattn as la

        if self._loaded is None:
            self._loaded = la.load(self.name)
        if conversation is None:
            return la.Session(*self._loaded)
        session = self._sessions.pop(conversation.id, None) or la.Session(*self._loaded)
        self._sessions[conversation.id] = session
        while len(self._sessions) > KEPT:
            self._sessions.popitem(last=False)
        return session


def _sampler(options):
    import mlx.core as mx

    import mlx_linattn as la

    if options.seed is not None:
        mx.random.seed(options.seed)
    return la.make_sampler(
        temp=options.temperature or 0.0,
        top_p=options.top_p or 0.0,
        min_p=options.min_p or 0.0,
        top_k=options.top_k or 0,
    )


def _messages(messages) -> tuple[str, list[dict]]:
    """llm's messages as chat templates take them: the system prompt, and the others."""
    system, result = [], []
    for message in messages:
        texts = {kind: "".join(p.text for p in message.parts if type(p).__name__ == kind) for kind in PARTS}
        if other := {type(part).__name__ for part in message.parts} - set(PARTS):
            raise llm.ModelError(f"this model reads text only, and the conversation holds {', '.join(sorted(other))}")
        if message.role == "system":
            system.append(texts["TextPart"])
            continue
        one = {"role": message.role, "content": texts["TextPart"]}
        if texts["ReasoningPart"]:
            one["reasoning_content"] = texts["ReasoningPart"]
        result.append(one)
    return "\n\n".join(system), result
