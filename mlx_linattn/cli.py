"""``mlx-linattn``: one command with a sub-command for each use."""

from __future__ import annotations

import difflib
import os
import sys
from importlib import import_module

from . import __version__
from .errors import LinAttnError

COMMANDS = {
    "chat": ("mlx_linattn.chat.cli", "talk to a model in the terminal; without --model, to the bundled demo"),
    "generate": ("mlx_linattn.generate_cli", "answer one prompt"),
    "serve": ("mlx_linattn.server.cli", "serve a model to OpenAI clients, on this machine"),
    "convert": ("mlx_linattn.convert.cli", "convert a published checkpoint to MLX weights, quantized if you like"),
    "info": ("mlx_linattn.info", "what a model needs: layers, parameters, state, cache, memory; downloads no weights"),
    "bench": ("mlx_linattn.bench.cli", "measure speed and memory at growing contexts, against mlx_lm if you like"),
    "recall": (
        "mlx_linattn.bench.recall_cli",
        "measure what a model remembers by distance, and the price of bounded memory",
    ),
    "doctor": ("mlx_linattn.doctor", "check the kernels on this machine against their references"),
}
HELP = ("-h", "--help", "help")
VERSION = ("-V", "--version", "version")


def usage() -> str:
    rows = "\n".join(f"  {name:<10} {what}" for name, (_, what) in COMMANDS.items())
    return (
        "usage: mlx-linattn COMMAND [options]\n\n"
        "Linear-attention hybrid language models, on your own machine.\n\n"
        f"commands:\n{rows}\n\n"
        "`mlx-linattn COMMAND --help` lists a command's options. To begin: mlx-linattn chat\n"
    )


def main(argv: list[str] | None = None) -> int:
    """Run a sub-command; errors that a user can mend end in one line on stderr and status 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    if debug:
        arguments.remove("--debug")
    if not arguments or arguments[0] in HELP:
        print(usage(), end="")
        return 0
    if arguments[0] in VERSION:
        print(f"mlx-linattn {__version__}")
        return 0
    name = arguments[0]
    if name not in COMMANDS:
        nearest = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.4)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        print(f"mlx-linattn: unknown command {name!r}{hint} (commands: {', '.join(COMMANDS)})", file=sys.stderr)
        return 2
    try:
        return import_module(COMMANDS[name][0]).main(arguments[1:])
    except LinAttnError as error:
        if debug:
            raise
        print(f"mlx-linattn: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if "mlx_linattn.parallel" in sys.modules:
            sys.modules["mlx_linattn.parallel"].check(error)  # ends the program where another rank is gone
        raise
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    sys.exit(main())
