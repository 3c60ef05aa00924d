"""A server in a thread of the test's process, on a free port."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import uvicorn

from mlx_linattn.server.app import Options, make_app
from mlx_linattn.server.cli import listen

USER = [{"role": "user", "content": "hi"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@contextmanager
def serving(engine, **options):
    """The URL of a server on ``engine``; options as in :class:`Options`."""
    listening = listen("127.0.0.1", 0)
    app = make_app(engine, Options(**{"name": "fake", **options}))
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="error", ws="none", loop="asyncio", lifespan="on", timeout_graceful_shutdown=2)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server does not stop"


def problem(response, status: int, code: str | None = None, param: str | None = None) -> str:
    """The message of an error object."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (code is None or error["code"] == code) and (param is None or error["param"] == param), error
    return error["message"]
