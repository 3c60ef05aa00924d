"""The web application: routes, limits and keys around one engine."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ..engine import Engine
from ..errors import ClosedError
from . import requests
from .problems import ApiError
from .replies import ChatReply, Reply, TextReply
from .requests import Asked, Defaults
from .streaming import ClientGone, EventStream, told, watched

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1", "[::1]")
OPEN_PATHS = ("/health",)  # what needs no key


@dataclass(frozen=True)
class Options:
    """How a server behaves.

    name: the model's id for clients.  api_key: what they must send; None asks for none.
    hosts: Host headers that are answered; None is all of them.  origins: web pages that may ask.
    max_body: bytes of a request.  body_seconds: how long it may take to arrive.
    keep_alive: seconds without an event after which a comment is sent.  close_seconds: for the engine to end.
    """

    name: str
    api_key: str | None = None
    hosts: Sequence[str] | None = LOCAL_HOSTS
    origins: Sequence[str] = ()
    defaults: Defaults = field(default_factory=Defaults)
    max_body: int = 32_000_000
    body_seconds: float = 30.0
    keep_alive: float = 5.0
    close_seconds: float = 5.0


def make_app(engine: Engine, options: Options) -> Starlette:
    """The application; it closes ``engine`` when it ends."""
    created = int(time.time())
    model = {"id": options.name, "object": "model", "created": created, "owned_by": "mlx-linattn"}
    names = {options.name, str(getattr(engine, "name", options.name))}  # its id, and the model as it was asked for

    async def health(_: Request) -> Response:
        try:
            engine.stats()
        except ClosedError as error:
            return JSONResponse({"status": "closed", **told(error).body}, 503)
        return JSONResponse({"status": "ok"})

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    async def one_model(request: Request) -> Response:
        known(request.path_params["name"])
        return JSONResponse(model)

    def known(name: str | None) -> None:
        if name is not None and name not in names:
            raise ApiError(
                404, f"the model {name!r} is not served here; this is {options.name!r}", "model_not_found", "model"
            )

    async def chat(request: Request) -> Response:
        has_tools = bool(getattr(engine.tokenizer, "has_tool_calling", False))
        return await answer(request, lambda body: requests.chat(body, options.defaults, has_tools), ChatReply)

    async def completions(request: Request) -> Response:
        return await answer(request, lambda body: requests.completion(body, options.defaults), TextReply)

    async def answer(request: Request, understand: Callable[[dict], Asked], kind: type[Reply]) -> Response:
        asked = understand(await read_json(request, options))
        known(asked.model)
        try:
            stream = await run_in_threadpool(engine.submit, asked.request)
            reply = kind(asked, options.name)
            if asked.stream:
                return EventStream(stream, reply, options.keep_alive)
            return JSONResponse(reply.whole([event async for event in watched(stream, request.receive, reply)]))
        except ClientGone:
            return Response(status_code=499)  # which nobody reads
        except Exception as error:
            raise told(error) from error

    @asynccontextmanager
    async def life(_: Starlette):
        yield
        await run_in_threadpool(engine.close, options.close_seconds)

    middleware = (
        [Middleware(TrustedHostMiddleware, allowed_hosts=list(options.hosts), www_redirect=False)]
        if options.hosts
        else []
    )
    if options.origins:
        middleware.append(
            Middleware(
                CORSMiddleware, allow_origins=list(options.origins), allow_methods=["GET", "POST"], allow_headers=["*"]
            )
        )
    if options.api_key:
        middleware.append(Middleware(KeyCheck, key=options.api_key))
    return Starlette(
        routes=[
            Route("/health", health),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", one_model),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
        ],
        middleware=middleware,
        exception_handlers={HTTPException: _no_route, ApiError: _problem},
        lifespan=life,
    )


async def _problem(_: Request, error: Exception) -> Response:
    problem = told(error)
    return JSONResponse(problem.body, problem.status, problem.headers)


async def _no_route(request: Request, error: HTTPException) -> Response:
    what = f"{request.method} {request.url.path}"
    problem = ApiError(
        error.status_code, f"{what}: {error.detail}", "unknown_url" if error.status_code == 404 else None
    )
    return JSONResponse(problem.body, problem.status, error.headers)


class KeyCheck:
    """Answers only who sends ``Authorization: Bearer KEY``."""

    def __init__(self, app: ASGIApp, key: str):
        self.app, self.key = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            sent = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            if not hmac.compare_digest(sent, self.key):
                problem = ApiError(401, "the API key is missing or wrong: send it as a bearer token", "invalid_api_key")
                return await JSONResponse(problem.body, problem.status, problem.headers)(scope, receive, send)
        return await self.app(scope, receive, send)


async def read_json(request: Request, options: Options) -> dict:
    """The JSON object of a request; raises ApiError where it is none, too large, or does not arrive."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a foreign web page can send other types without being asked for its origin
        raise ApiError(
            415, f"Content-Type is {kind or 'missing'}, expected application/json", "unsupported_content_type"
        )
    too_large = ApiError(413, f"the request is larger than {options.max_body:,} bytes", "request_too_large")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > options.max_body:
        raise too_large

    async def read() -> bytes:
        data = bytearray()
        async for piece in request.stream():
            data += piece
            if len(data) > options.max_body:
                raise too_large
        return bytes(data)

    try:
        data = await asyncio.wait_for(read(), options.body_seconds)
    except asyncio.TimeoutError:
        raise ApiError(408, "the request did not arrive in time", "request_timeout") from None
    try:
        value = json.loads(data, parse_constant=_no_constant)
        json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the request is not JSON ({error})", "invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the request is JSON, but no object", "invalid_json")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
