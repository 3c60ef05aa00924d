"""Waiting for other threads."""

from __future__ import annotations

import threading
from collections.abc import Callable


def eventually(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for another thread."""
    pause = threading.Event()
    for _ in range(int(seconds * 100)):
        if holds():
            return
        pause.wait(0.01)
    raise AssertionError("it did not come to pass")


def everyone(*acts: Callable) -> list:
    """The results of functions, each in a thread of its own."""
    results: list = [None] * len(acts)

    def run(i: int) -> None:
        try:
            results[i] = acts[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "somebody still waits"
    return results
