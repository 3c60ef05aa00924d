"""One model for many callers: a thread that owns it, rows that decode together, and prefixes that are read once."""

from .engine import Engine, Stats
from .stream import Stream
from .types import (
    Answer,
    Done,
    Event,
    Progress,
    Reasoning,
    Request,
    Text,
    Timing,
    TokenLogprob,
    ToolCall,
    Usage,
)

__all__ = [
    "Answer",
    "Done",
    "Engine",
    "Event",
    "Progress",
    "Reasoning",
    "Request",
    "Stats",
    "Stream",
    "Text",
    "Timing",
    "TokenLogprob",
    "ToolCall",
    "Usage",
]
