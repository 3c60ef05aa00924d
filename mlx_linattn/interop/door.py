"""The one door through which mlx_lm and transformers come in.

Importing mlx_lm takes a second and lowers the process's limit on open files (its utils.py calls ``setrlimit``), which a
host app cannot raise again. So they are imported when they are needed, here, with that call held off.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

_lock = threading.Lock()


def mlx_lm(module: str = "") -> ModuleType:
    """``mlx_lm`` or one of its modules, ``mlx_lm("sample_utils")``; the process's limits stay as they are."""
    with _lock, _limits_kept():
        return importlib.import_module(f"mlx_lm.{module}" if module else "mlx_lm")


@contextmanager
def _limits_kept() -> Iterator[None]:
    try:
        import resource
    except ImportError:  # not on Windows
        yield
        return
    original = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        yield
    finally:
        resource.setrlimit = original
