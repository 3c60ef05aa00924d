"""``mlx-linattn serve``: options, the listening socket, and uvicorn."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
from pathlib import Path

from ..errors import RequestError
from ..generate_cli import (
    add_memory_options,
    add_model_options,
    add_parallel_option,
    join_ranks,
    kv_options,
    memory_limit,
)

KEY_VARIABLE = "MLX_LINATTN_API_KEY"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx-linattn serve", description="Serve a model to OpenAI clients. By default to this machine alone."
    )
    add_model_options(parser)
    add_parallel_option(parser)
    parser.add_argument("--served-name", metavar="ID", help="the model's id for clients (default: as in --model)")
    net = parser.add_argument_group("network")
    net.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    net.add_argument("--port", type=int, default=8080, help="port; 0: any free one (default: %(default)s)")
    net.add_argument(
        "--api-key", metavar="KEY", help=f"clients must send it (better: in the environment, {KEY_VARIABLE})"
    )
    net.add_argument(
        "--cors-origin", action="append", default=[], metavar="URL", help="a web page's origin that may ask; repeatable"
    )
    net.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="another Host header to answer, as behind a proxy; repeatable",
    )
    net.add_argument("--log-requests", action="store_true", help="print a line on stderr for each request")
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-rows", type=int, default=8, metavar="N", help="answers made at the same time (default: %(default)s)"
    )
    limits.add_argument(
        "--max-queue",
        type=int,
        default=64,
        metavar="N",
        help="requests that may wait; others get status 429 (default: %(default)s)",
    )
    limits.add_argument(
        "--max-context", type=int, metavar="N", help="tokens of prompt and answer together (default: as memory allows)"
    )
    limits.add_argument(
        "--max-body", type=float, default=32.0, metavar="MB", help="size of a request (default: %(default)g)"
    )
    limits.add_argument(
        "--shutdown-timeout",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds for running answers to end when the server is stopped (default: %(default)g)",
    )
    limits.add_argument(
        "--prefix-memory",
        type=float,
        metavar="GB",
        help="memory for prompts to go on from; 0: none (default: a sixteenth of the device's)",
    )
    limits.add_argument("--prefix-folder", metavar="FOLDER", help="keep them on disk too, to survive a restart")
    sampling = parser.add_argument_group("what a request gets that does not say otherwise")
    sampling.add_argument(
        "--max-tokens", type=int, default=4096, help="longest answer; -1: no limit (default: %(default)s)"
    )
    sampling.add_argument("--temp", type=float, default=0.0, help="temperature; 0: greedy (default: %(default)s)")
    sampling.add_argument("--top-p", type=float, default=0.0, help="nucleus sampling; 0: off (default: %(default)s)")
    sampling.add_argument(
        "--min-p", type=float, default=0.0, help="least probability relative to the best (default: %(default)s)"
    )
    sampling.add_argument("--top-k", type=int, default=0, help="sample from the best K; 0: all (default: %(default)s)")
    add_memory_options(parser)
    return parser


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    _check(args)
    try:
        import starlette.applications  # noqa: F401
        import uvicorn
    except ModuleNotFoundError as error:
        raise RequestError(f"serve needs {error.name}: pip install 'mlx-linattn[server]'") from error
    key = args.api_key or os.environ.get(KEY_VARIABLE) or None
    group = join_ranks(args)
    if group is not None:  # uvicorn ends with the signal that stopped it: the other ranks must hear of it first
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    local = args.host in LOOPBACK
    listening = listen(args.host, args.port)  # before the model is loaded: a port in use is known at once
    from ..engine import Engine
    from .app import LOCAL_HOSTS, Options, make_app
    from .requests import Defaults

    with listening:
        prefix = {} if args.prefix_memory is None else {"prefix_bytes": int(args.prefix_memory * 1e9)}
        engine = Engine(
            args.model, max_rows=args.max_rows, max_queue=args.max_queue, prefix_folder=args.prefix_folder,
            memory_limit=memory_limit(args), max_context=args.max_context, revision=args.revision, dtype=args.dtype, group=group,
            **prefix, **kv_options(args),
        )  # fmt: skip
        try:
            options = Options(
                name=args.served_name or served_name(args.model),
                api_key=key,
                hosts=[*LOCAL_HOSTS, *args.allowed_host] if local else args.allowed_host or None,
                origins=args.cors_origin,
                defaults=Defaults(args.max_tokens, args.temp, args.top_p, args.min_p, args.top_k),
                max_body=int(args.max_body * 1e6),
            )
            config = uvicorn.Config(
                make_app(engine, options), log_config=None, access_log=args.log_requests,
                timeout_graceful_shutdown=args.shutdown_timeout, server_header=False, lifespan="on", ws="none", loop="asyncio",
            )  # fmt: skip
            logging.basicConfig(format="%(asctime)s %(message)s")  # on stderr
            logging.getLogger("uvicorn.access").setLevel(logging.INFO)
            host = f"[{args.host}]" if ":" in args.host else args.host
            print(
                f"Serving {options.name} at http://{host}:{listening.getsockname()[1]}/v1 (Ctrl-C stops)",
                file=sys.stderr,
                flush=True,
            )
            if not local and not key:
                print(
                    f"Everyone who reaches this address can use it: --api-key or {KEY_VARIABLE} asks for a key.",
                    file=sys.stderr,
                    flush=True,
                )
            uvicorn.Server(config).run(sockets=[listening])
        finally:
            engine.close(5.0)
    return 0


def served_name(model: str) -> str:
    """The id of a model for clients: of a folder its last part, else as it was asked for."""
    return Path(model).expanduser().resolve().name if Path(model).expanduser().is_dir() else model


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; raises RequestError where that is not possible."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=128)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RequestError(
            f"cannot listen on {host} port {port} ({reason}); choose another --host or --port"
        ) from error


def _check(args: argparse.Namespace) -> None:
    for name, low, high in (
        ("max_rows", 1, None), ("max_queue", 0, None), ("max_context", 1, None), ("max_body", 0, None), ("shutdown_timeout", 0, None),
        ("prefix_memory", 0, None), ("temp", 0, 2), ("top_p", 0, 1), ("min_p", 0, 1), ("top_k", 0, None),
    ):  # fmt: skip
        value = getattr(args, name)
        if value is not None and (value < low or (high is not None and value > high)):
            limits = f"between {low} and {high}" if high is not None else f"{low} or more"
            raise RequestError(f"--{name.replace('_', '-')} is {value}, expected {limits}")
    if args.max_tokens == 0 or args.max_tokens < -1:
        raise RequestError(f"--max-tokens is {args.max_tokens}, expected a positive number, or -1 for no limit")
    if "*" in args.cors_origin:
        raise RequestError("--cors-origin '*' would let every web page use this server: name the pages that may")
