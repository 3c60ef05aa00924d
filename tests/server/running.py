"""A server in a thread of the test's process, on a free port."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import uvicorn

from mlx_linattn.server.app import Options, make_app
from mlx_linattn.server.cli import listen


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


def until(holds, seconds: float = 20.0) -> None:
    """Wait for something that must come true."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it does not come true"
        time.sleep(0.01)
