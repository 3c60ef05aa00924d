"""What a model remembers: fixed arrays for recurrent layers, a growing or bounded cache for attention layers, one count of tokens.

MLX arrays never change, so a snapshot of recurrent layers is a handful of references, and a snapshot of a cache is its
length: both have a constant size. Rows of a batch can hold different numbers of tokens; each row is stored without gaps.
"""

from .kv import KVPiece, KVQuantization, KVState
from .model_state import ModelState, Snapshot
from .options import SINKS, KVOptions
from .recurrent import RecurrentState
from .span import Span
from .window import WindowState

__all__ = [
    "SINKS",
    "KVOptions",
    "KVPiece",
    "KVQuantization",
    "KVState",
    "ModelState",
    "RecurrentState",
    "Snapshot",
    "Span",
    "WindowState",
]
