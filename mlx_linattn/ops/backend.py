"""Which implementation an operation uses, decided in one place.

``reference``  plain float32 MLX that reads like the formula
``mlx``        plain MLX, chunked, for any device and shape
``metal``      a Metal kernel      ``cuda``   the same kernel body on an NVIDIA GPU

"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ..errors import RequestError

BACKENDS = ("reference", "mlx", "metal", "cuda")
_forced: ContextVar[tuple[str | None, str | None]] = ContextVar("backend", default=(None, None))


@contextmanager
def use_backend(name: str, path: str | None = None) -> Iterator[None]:
    """Force every operation inside the ``with`` block to one of :data:`BACKENDS`.

    A shape that the forced kernel refuses still takes the plain MLX path. ``path`` picks one row's path of the dispatch
    table for the operations that have it, whatever T is, as long as it takes the shape.
    """
    if name not in BACKENDS:
        raise RequestError(f"backend {name!r} is not known; choose one of {', '.join(BACKENDS)}")
    token = _forced.set((name, path))
    try:
        yield
    finally:
        _forced.reset(token)


def forced_backend() -> str | None:
    """The backend of the innermost :func:`use_backend`, or None."""
    return _forced.get()[0]


def forced_path() -> str | None:
    """The path of the innermost :func:`use_backend`, or None."""
    return _forced.get()[1]
