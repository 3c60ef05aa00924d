"""What a program holds, by MLX's own count."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import mlx.core as mx


class Meter:
    """What one program holds, seen from outside: how MLX's count of active memory changes while it works."""

    def __init__(self, side):
        self.side, self.held, self.peak = side, 0, 0

    def do(self, action: Callable[[], Any], others: int) -> Any:
        """What ``action`` returns; ``others`` is what the other programs hold meanwhile."""
        before = active()
        mx.reset_peak_memory()
        result = action()
        self.peak = max(self.peak, mx.get_peak_memory() - others)
        self.held += active() - before
        return result


def active(collect: bool = False) -> int:
    """Bytes in use; with ``collect``, once Python has let go of what only cycles hold, which takes a while."""
    if collect:
        gc.collect()
    mx.synchronize()  # what a GPU is done with is let go of in passing
    mx.clear_cache()
    return mx.get_active_memory()
