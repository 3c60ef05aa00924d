"""A conversation that remembers: messages as the text, a state as the memory, and checkpoints to go back to."""

from .session import Piece, Session

__all__ = ["Piece", "Session"]
