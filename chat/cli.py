"""``mlx-linattn chat``: a conversation in the terminal, or one answer for a script."""

from __future__ import annotations

import argparse
import sys

import mlx_linattn as la
from mlx_linattn.errors import RequestError
from mlx_linattn.generate_cli import (
    add_memory_options,
    add_model_options,
    add_sampling_options,
    kv_options,
    make_sampler,
    memory_limit,
)

from .repl import Repl
from .view import View

DEMO_NOTE = (
    "This is the bundled demo, a 5-million-parameter hybrid that remembers facts you tell it and knows nothing else. "
    "Real models: --model mlx-community/Qwen3.5-4B-4bit (8 GB of memory), "
    "mlx-community/Qwen3.5-9B-4bit (16 GB), mlx-community/Qwen3.6-35B-A3B-4bit (32 GB)."
)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx-linattn chat", description="Talk to a model. Without --model: the bundled demo, offline."
    )
    add_model_options(parser)
    parser.add_argument(
        "-p", "--prompt", help="answer this one message and leave: the answer on stdout, all else on stderr"
    )
    parser.add_argument("--system-prompt", "--system", help="system prompt")
    think = parser.add_mutually_exclusive_group()
    think.add_argument("--think", dest="think", action="store_true", default=None, help="let the model think first")
    think.add_argument(
        "--no-think", dest="think", action="store_false", help="no thinking (default: as the model's template)"
    )
    add_sampling_options(parser, max_tokens=-1)
    add_memory_options(parser)
    return parser


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    sampler = make_sampler(args)
    view = View()
    question = args.prompt
    if question is None and not sys.stdin.isatty():
        question = sys.stdin.read()
    if question is not None and not question.strip():
        raise RequestError("there is nothing to answer: the message is empty")
    if args.model == "demo" and question is None:
        view.note(DEMO_NOTE)
    limit = memory_limit(args)
    model, tokenizer = la.load(args.model, revision=args.revision, dtype=args.dtype, memory_limit=limit)
    template = {} if args.think is None else {"enable_thinking": args.think}
    session = la.Session(
        model, tokenizer, system=args.system_prompt, memory_limit=limit, **kv_options(args), **template
    )
    options = {"max_tokens": args.max_tokens, "sampler": sampler, "prefill_step_size": args.prefill_step_size}
    repl = Repl(session, args.model, view, options)
    return repl.once(question) if question is not None else repl.run()
