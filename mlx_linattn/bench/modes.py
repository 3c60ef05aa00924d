"""Three ways to keep the context that attention layers see, by name."""

from __future__ import annotations

import argparse

from ..errors import RequestError
from ..state import KVOptions

CONTEXTS = tuple(2**10 * 4**i for i in range(6))  # to measure at: 1k to 1M
MODES = ("exact", "quantized-kv", "constant")
ABOUT = (
    "exact keeps all keys and values as they are, quantized-kv keeps them in --kv-bits, constant keeps the first 4 and the latest "
    "tokens, --max-kv-size in all"
)


def add_mode_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--modes", default=",".join(MODES), metavar="LIST", help=f"{ABOUT} (default: %(default)s)")
    parser.add_argument("--max-kv-size", type=int, default=1024, metavar="N", help="of constant (default: %(default)s)")
    parser.add_argument("--kv-bits", type=int, default=8, help="of quantized-kv (default: %(default)s)")
    parser.add_argument("--kv-group-size", type=int, default=64, help="features to a scale (default: %(default)s)")


def chosen_modes(args: argparse.Namespace) -> dict[str, KVOptions]:
    """By name, in the order given; raises RequestError for a name that is none."""
    known = {
        "exact": KVOptions(),
        "quantized-kv": KVOptions(kv_bits=args.kv_bits, kv_group_size=args.kv_group_size),
        "constant": KVOptions(max_kv_size=args.max_kv_size),
    }
    names = [name.strip() for name in args.modes.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise RequestError(f"--modes: {name!r} is not known; choose from {', '.join(known)}")
    if not names:
        raise RequestError(f"--modes is empty; choose from {', '.join(known)}")
    return {name: known[name] for name in dict.fromkeys(names)}


def parse_tokens(text: str) -> int:
    """Tokens from ``16384``, ``16k`` or ``1M`` (1024 and 1024 squared)."""
    factor = {"k": 2**10, "m": 2**20}.get(text[-1:].lower(), 1)
    digits = text[:-1] if factor > 1 else text
    if not digits.isascii() or not digits.isdecimal() or int(digits) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens such as 4096, 16k or 1M")
    return int(digits) * factor


def parse_contexts(text: str) -> tuple[int, ...]:
    """Several of them, comma between, in rising order."""
    return tuple(sorted({parse_tokens(part.strip()) for part in text.split(",")}))


def short(tokens: int) -> str:
    """16384 as 16k, 1048576 as 1M."""
    for size, unit in ((2**20, "M"), (2**10, "k")):
        if tokens % size == 0:
            return f"{tokens // size}{unit}"
    return f"{tokens:,}"
