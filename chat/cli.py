"""``mlx-linattn chat``: a conversation in the terminal, or one answer for a script."""

from __future__ import annotations

import argparse
import json
import os
import sys

import mlx_linattn as la
from mlx_linattn.errors import MemoryLimitError, RequestError, SessionFileError
from mlx_linattn.generate_cli import (
    add_memory_options,
    add_model_options,
    add_parallel_option,
    add_sampling_options,
    join_ranks,
    kv_options,
    memory_limit,
)

from . import commands  # noqa: F401 - they register themselves, as file_commands do
from .conversation import Conversation
from .documents import read_text
from .file_commands import list_sessions
from .lines import History, make_reader
from .repl import Repl
from .sessions import Record, Store, data_folder
from .settings import NUMBERS, Settings
from .signals import Signals
from .view import View

RECOMMENDED = (  # (GB of memory, model)
    (8, "mlx-community/Qwen3.5-4B-4bit"),
    (16, "mlx-community/Qwen3.5-9B-4bit"),
    (32, "mlx-community/Qwen3.6-35B-A3B-4bit"),
)
DEMO_NOTE = (
    "This is the bundled demo, a 5-million-parameter hybrid. It remembers facts that you tell it, such as "
    "'My dog is called Pepper.', and knows nothing else. Real models, by your machine's memory:"
)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx-linattn chat", description="Talk to a model. Without --model: the bundled demo, offline."
    )
    add_model_options(parser)
    add_parallel_option(parser)
    parser.set_defaults(model=None)
    script = parser.add_argument_group("scripts")
    script.add_argument(
        "-p", "--prompt", help="answer this one message and leave: the answer on stdout, all else on stderr"
    )
    script.add_argument("--json", action="store_true", help="the answer, its counts and sizes as one JSON object")
    parser.add_argument("--system-prompt", "--system", help="system prompt")
    parser.add_argument(
        "--read", action="append", default=[], metavar="FILE", help="read a text first; - is standard input; repeatable"
    )
    think = parser.add_mutually_exclusive_group()
    think.add_argument("--think", dest="think", action="store_true", default=None, help="let the model think first")
    think.add_argument(
        "--no-think", dest="think", action="store_false", help="no thinking (default: as the model's template)"
    )
    parser.add_argument("--no-markdown", action="store_true", help="show answers as the model writes them")
    kept = parser.add_argument_group("conversations")
    which = kept.add_mutually_exclusive_group()
    which.add_argument("--continue", dest="latest", action="store_true", help="go on with the latest conversation")
    which.add_argument("--session", metavar="NAME", help="go on with this conversation, or begin it")
    which.add_argument("--list-sessions", action="store_true", help="list the kept conversations")
    kept.add_argument("--no-save", action="store_true", help="keep nothing of this chat on disk")
    add_sampling_options(parser, max_tokens=-1)
    add_memory_options(parser)
    return parser


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    settings = _settings(args)
    group = join_ranks(args)
    view = View(quiet=args.json)
    if args.list_sessions:
        view.out.print(list_sessions(Store()))
        return 0
    question = args.prompt
    if question is None and not sys.stdin.isatty() and "-" not in args.read:
        question = sys.stdin.read()
    if question is not None and not question.strip():
        raise RequestError("there is nothing to answer: the message is empty")
    if args.json and question is None:
        raise RequestError("--json answers one message: give it with -p, or pipe it in")
    script = question is not None
    store = None if args.no_save else Store()
    name, record = _session_name(args, store)
    model_id = args.model or (record.model if record else "") or "demo"
    limit = memory_limit(args)
    options = {"memory_limit": limit, **kv_options(args)}

    def load(model_id: str, lazy: bool = False):
        try:
            return la.load(
                model_id, revision=args.revision, dtype=args.dtype, memory_limit=limit, lazy=lazy, group=group
            )
        except MemoryLimitError as error:
            raise MemoryLimitError(f"{error}. {_smaller(model_id)}") from error

    if model_id == "demo" and not script:
        _welcome(view)
    documents = _documents(args.read)
    if "-" in args.read and not script:
        _ask_the_terminal()
    model, tokenizer = load(model_id)  # Ctrl-C ends the program until here, and only an answer from here on
    template = {} if args.think is None else {"enable_thinking": args.think}
    session = la.Session(model, tokenizer, args.system_prompt, **options, **template)
    with Signals() as signals:
        conversation = Conversation(session, model_id, store, load, view.error, **options)
        repl = Repl(conversation, view, settings, signals)
        if record:
            repl.resumed(repl.conversation.resume(name))
            repl.session.template.update(template)
            repl.session.system = args.system_prompt or repl.session.system
        elif name:
            conversation.record = Record(name, named=True)
        elif script:
            conversation.store = None  # one answer for a script is no conversation to keep
        if documents:
            repl.read_documents(documents)
        if script:
            return _once(repl, question, args.json)
        view.note(
            f"Talking to {repl.conversation.model_name}. /help lists commands; Ctrl-C stops an answer, Ctrl-D leaves."
        )
        return repl.run(make_reader(repl.complete, History(data_folder() / "history"), signals))


def _ask_the_terminal() -> None:
    """Standard input was a document; questions come from the terminal."""
    try:
        os.dup2(os.open("/dev/tty", os.O_RDONLY), 0)
    except OSError as error:
        raise RequestError("--read - leaves no terminal to ask from: give the question with -p") from error


def _settings(args: argparse.Namespace) -> Settings:
    settings = Settings(markdown=not args.no_markdown, prefill_step_size=args.prefill_step_size)
    for key in NUMBERS:
        value = getattr(args, key)
        if value is not None:
            settings.number(key, str(value), "--" + key.replace("_", "-"))
    if args.prefill_step_size is not None and args.prefill_step_size < 1:
        raise RequestError(f"--prefill-step-size is {args.prefill_step_size}, expected at least 1")
    return settings


def _session_name(args: argparse.Namespace, store: Store | None) -> tuple[str, Record | None]:
    """The conversation that was asked for, and what is known of it if it exists."""
    if not (args.latest or args.session):
        return "", None
    if store is None:
        raise RequestError("--no-save keeps nothing: it cannot go with --continue or --session")
    names = store.names()
    if args.latest and not names:
        raise RequestError("there is no conversation to continue yet: begin one with mlx-linattn chat")
    name = names[0] if args.latest else args.session
    store.path(name)
    if name not in names:
        return name, None
    try:
        return name, store.read(name)
    except SessionFileError:  # to be mended, or told, once there is a model
        return name, Record(name)


def _documents(names: list[str]) -> dict[str, str]:
    found = {}
    for name in names:
        if name == "-":
            if sys.stdin.isatty():
                raise RequestError("--read -: pipe a text in")
            found["standard input"] = sys.stdin.read()
        else:
            found[name] = read_text(name)
    return found


def _welcome(view: View) -> None:
    view.note(DEMO_NOTE)
    for memory, model in RECOMMENDED:
        view.note(f"  {memory:>2} GB   --model {model}")


def _smaller(model_id: str) -> str:
    """What to try instead of a model that does not fit."""
    others = [model for _, model in RECOMMENDED if model != model_id]
    return f"A smaller one: mlx-linattn chat --model {others[0]}" if model_id != RECOMMENDED[0][1] else ""


def _once(repl: Repl, question: str, as_json: bool) -> int:
    """One question from a script. The answer alone, or one JSON object, goes to stdout."""
    session = repl.session
    if not as_json:
        finished = repl.answer(session.stream, question)
    else:
        repl.stream(session.stream, question, show=False)
        last, state, answer = session.last, session.state, session.messages[-1] if session.messages else {}
        finished = last.finish_reason != "cancel"
        found = {
            "answer": answer.get("content", ""),
            "reasoning": answer.get("reasoning_content"),
            "model": repl.conversation.model_id,
            "finish_reason": last.finish_reason,
            "prompt_tokens": last.prompt_tokens,
            "reused_tokens": last.reused_tokens,
            "prefilled_tokens": last.prefilled_tokens,
            "generation_tokens": last.generation_tokens,
            "prompt_seconds": round(repl.conversation.totals.read_seconds, 4),
            "generation_tps": round(last.generation_tps, 2),
            "peak_memory_bytes": round(last.peak_memory * 1e9),
            "state_bytes": state.recurrent_nbytes,
            "kv_bytes": state.kv_nbytes,
            "session": repl.conversation.record.name if repl.conversation.store else None,
        }
        print(json.dumps(found, ensure_ascii=False), flush=True)
    repl.conversation.keep()
    return 128 + repl.signals.leaving if repl.signals.leaving else 0 if finished else 130
