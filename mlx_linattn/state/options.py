from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from ..errors import RequestError
from .kv import KVQuantization, KVState
from .recurrent import RecurrentState
from .window import WindowState

SINKS = 4  # first tokens that a bounded cache always keeps: attention leans on them (Xiao et al. 2023)


@dataclass(frozen=True)
class KVOptions:
    """How attention layers keep their context; mlx_lm's names.

    max_kv_size: the most tokens a layer keeps, the first :data:`SINKS` and the latest others. Memory and the time of a token are
        then constant, and attention forgets what lies between: only recurrent layers remember it. None keeps everything.
    kv_bits: store keys and values in this many bits (2, 3, 4, 5, 6 or 8). None keeps them as they are.
    kv_group_size: features that share one scale: 32, 64 or 128.
    quantized_kv_start: tokens before this position stay as they are.
    """

    max_kv_size: int | None = None
    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = 0

    def __post_init__(self) -> None:
        if self.max_kv_size is not None and self.max_kv_size <= SINKS:
            raise RequestError(
                f"max_kv_size is {self.max_kv_size}, expected more than {SINKS}: {SINKS} places are for the first tokens"
            )
        if self.kv_bits is None:
            return
        if self.kv_bits not in (2, 3, 4, 5, 6, 8):
            raise RequestError(f"kv_bits is {self.kv_bits}, expected 2, 3, 4, 5, 6 or 8")
        if self.kv_group_size not in (32, 64, 128):
            raise RequestError(f"kv_group_size is {self.kv_group_size}, expected 32, 64 or 128")
        if self.quantized_kv_start < 0:
            raise RequestError(f"quantized_kv_start is {self.quantized_kv_start}, expected 0 or more")
        if self.max_kv_size is not None:
            raise RequestError("max_kv_size and kv_bits cannot be combined: choose one way to save memory")

    def apply(self, layers: Iterable[RecurrentState | KVState]) -> list[RecurrentState | KVState]:
        """Empty layer states, with every growing cache made as these options say. A layer's own window stays as it is."""
        return [self._bounded(layer) if isinstance(layer, KVState) else layer for layer in layers]

    def _bounded(self, layer: KVState) -> RecurrentState | KVState:
        if self.max_kv_size is not None:
            return WindowState(self.max_kv_size - SINKS, SINKS)
        if self.kv_bits is not None:
            layer.quantization = KVQuantization(self.kv_bits, self.kv_group_size, self.quantized_kv_start)
        return layer

    def as_dict(self) -> dict:
        """The four numbers by their names, as every function that takes them calls them."""
        return asdict(self)
