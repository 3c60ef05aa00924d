"""``mlx-linattn generate``: one prompt, one answer, with mlx_lm.generate's options."""

from __future__ import annotations

import argparse
import json
import sys

from .errors import RequestError
from .loading import DTYPES


def add_model_options(parser: argparse.ArgumentParser, required: bool = False) -> None:
    parser.add_argument(
        "--model", required=required, default=None if required else "demo", help="folder or Hub id (default: demo)"
    )
    parser.add_argument("--revision", help="branch, tag or commit on the Hub")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the weights (default: as stored)")


def add_parallel_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--parallel",
        choices=("tensor",),
        help="share the model with the other processes that mlx.launch starts: tensor deals out every layer",
    )


def join_ranks(args: argparse.Namespace):
    """The ranks to load the model with, as ``load(..., group=)`` takes them; None where it runs in this process alone.

    To be called before anything is read or printed: on every rank but the first this is all of the program. It loads its
    part of the model, does what the first rank says, and exits.
    """
    if args.parallel is None:
        return None
    from .loading import load_model
    from .parallel import start

    group = start(args.parallel)
    if group.rank:
        load_model(
            args.model or "demo", revision=args.revision, dtype=args.dtype, memory_limit=memory_limit(args), group=group
        )
    return group


def add_sampling_options(parser: argparse.ArgumentParser, temp: float = 0.0, max_tokens: int = 256) -> None:
    parser.add_argument(
        "--max-tokens",
        "-m",
        type=int,
        default=max_tokens,
        help="longest answer, in tokens; -1: no limit (default: %(default)s)",
    )
    parser.add_argument(
        "--temp", type=float, default=temp, help="sampling temperature; 0: greedy (default: %(default)s)"
    )
    parser.add_argument("--top-p", type=float, default=0.0, help="nucleus sampling; 0: off (default: %(default)s)")
    parser.add_argument(
        "--min-p", type=float, default=0.0, help="least probability relative to the best (default: %(default)s)"
    )
    parser.add_argument("--top-k", type=int, default=0, help="sample from the best K; 0: all (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="seed of the sampler, for repeatable answers")
    parser.add_argument(
        "--prefill-step-size", type=int, help="prompt tokens read at a time (default: up to 2048, as memory allows)"
    )


def add_memory_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--memory-limit", type=float, metavar="GB", help="refuse what needs more (default: what the device recommends)"
    )
    parser.add_argument("--force", action="store_true", help="refuse nothing for its memory")
    parser.add_argument(
        "--max-kv-size", type=int, metavar="N", help="attention keeps the first 4 and the latest tokens, N in all"
    )
    parser.add_argument("--kv-bits", type=int, help="store attention's keys and values in so many bits")
    parser.add_argument("--kv-group-size", type=int, default=64, help="features to a scale (default: %(default)s)")
    parser.add_argument(
        "--quantized-kv-start", type=int, default=0, help="tokens that stay unquantized (default: %(default)s)"
    )


def memory_limit(args: argparse.Namespace) -> float | None:
    """Bytes, as the library takes them."""
    if args.force:
        return float("inf")
    if args.memory_limit is None:
        return None
    if args.memory_limit <= 0:
        raise RequestError(f"--memory-limit is {args.memory_limit}, expected a number of gigabytes above 0")
    return args.memory_limit * 1e9


def kv_options(args: argparse.Namespace) -> dict:
    return {name: getattr(args, name) for name in ("max_kv_size", "kv_bits", "kv_group_size", "quantized_kv_start")}


def make_sampler(args: argparse.Namespace):
    import mlx.core as mx

    from . import sampling

    for name, low, high in (("temp", 0, None), ("top_p", 0, 1), ("min_p", 0, 1), ("top_k", 0, None)):
        value = getattr(args, name)
        if value < low or (high is not None and value > high):
            limits = f"between {low} and {high}" if high is not None else f"{low} or more"
            raise RequestError(f"--{name.replace('_', '-')} is {value}, expected {limits}")
    if args.max_tokens == 0 or args.max_tokens < -1:
        raise RequestError(f"--max-tokens is {args.max_tokens}, expected a positive number, or -1 for no limit")
    if args.prefill_step_size is not None and args.prefill_step_size < 1:
        raise RequestError(f"--prefill-step-size is {args.prefill_step_size}, expected at least 1")
    if args.seed is not None:
        mx.random.seed(args.seed)
    return sampling.make_sampler(temp=args.temp, top_p=args.top_p, min_p=args.min_p, top_k=args.top_k)


def template_options(text: str | None) -> dict:
    """The dictionary of ``--chat-template-config``."""
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise RequestError(
            f"--chat-template-config is not JSON ({error}); write it like '{{\"enable_thinking\": true}}'"
        ) from error
    if not isinstance(value, dict):
        raise RequestError("--chat-template-config must be a JSON object, like '{\"enable_thinking\": true}'")
    return value


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mlx-linattn generate", description="Answer one prompt.")
    add_model_options(parser)
    add_parallel_option(parser)
    parser.add_argument("--prompt", "-p", default="-", help="the prompt; '-' reads it from standard input (default)")
    parser.add_argument("--system-prompt", help="system prompt for the chat template")
    parser.add_argument("--ignore-chat-template", action="store_true", help="use the prompt as it is")
    parser.add_argument("--chat-template-config", help="JSON object of chat-template arguments")
    parser.add_argument("--verbose", type=_truth, default=True, help="print speed and memory on stderr (default: True)")
    add_sampling_options(parser)
    add_memory_options(parser)
    return parser


def _truth(text: str) -> bool:
    if text.lower() in ("true", "t", "1", "yes"):
        return True
    if text.lower() in ("false", "f", "0", "no"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    group = join_ranks(args)
    sampler = make_sampler(args)
    options = template_options(args.chat_template_config)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt.replace("\\n", "\n").replace("\\t", "\t")
    if not prompt.strip():
        raise RequestError("the prompt is empty: give --prompt TEXT, or pipe it in")

    from .generation import stream_generate
    from .loading import load

    limit = memory_limit(args)
    model, tokenizer = load(args.model, revision=args.revision, dtype=args.dtype, memory_limit=limit, group=group)
    ids = prompt
    if not args.ignore_chat_template and tokenizer.has_chat_template:
        system = [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []
        messages = [*system, {"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)
    response = None
    for response in stream_generate(
        model,
        tokenizer,
        ids,
        max_tokens=args.max_tokens,
        sampler=sampler,
        prefill_step_size=args.prefill_step_size,
        memory_limit=limit,
        **kv_options(args),
    ):
        print(response.text, end="", flush=True)
    print()
    if args.verbose and response:
        print(
            f"prompt {response.prompt_tokens} tokens, {response.prompt_tps:,.1f} a second; "
            f"answer {response.generation_tokens} tokens, {response.generation_tps:,.1f} a second; "
            f"peak memory {response.peak_memory:.3f} GB",
            file=sys.stderr,
        )
    return 0
