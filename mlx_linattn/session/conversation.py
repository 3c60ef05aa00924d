"""The messages of a conversation, and what a user does to them between two turns."""

from __future__ import annotations

from ..errors import RequestError


class Conversation:
    """``messages`` (without the system prompt) and ``system`` can be assigned, or changed in place, at any time."""

    def __init__(self, system: str | None = None, messages: list[dict] | None = None):
        self.system, self.messages = system, list(messages or [])
        self._undone: list[tuple[list[dict], list[dict]]] = []  # (what undo left, what it took away)

    def clear(self) -> None:
        """Forget all messages; the system prompt stays."""
        self.messages = []

    def undo(self, n: int = 1) -> list[dict]:
        """Take back the last ``n`` turns, each from a user's message on; returns the messages taken away."""
        starts = [i for i, message in enumerate(self.messages) if message.get("role") == "user"]
        if not 1 <= n <= len(starts):
            raise RequestError(f"cannot undo {n} turns: the conversation has {len(starts)}")
        kept, gone = self.messages[: starts[-n]], self.messages[starts[-n] :]
        self._undone.append((kept, gone))
        self.messages = list(kept)
        return list(gone)

    def redo(self) -> list[dict]:
        """Put back what the last :meth:`undo` took away; returns it."""
        if not self._undone or self._undone[-1][0] != self.messages:
            raise RequestError("there is nothing to redo: nothing was undone, or the conversation went on since")
        _, gone = self._undone.pop()
        self.messages = [*self.messages, *gone]
        return list(gone)

    def edit(self, i: int, text: str) -> None:
        """Give message ``i`` (negative: from the end) another text and drop those after it.

        Then :meth:`send` or :meth:`stream` without a text answers an edited question; :meth:`continue_` goes on with an
        edited answer.
        """
        if not -len(self.messages) <= i < len(self.messages):
            raise RequestError(f"there is no message {i}: the conversation has {len(self.messages)}")
        i %= len(self.messages)
        self.messages = [*self.messages[:i], {**self.messages[i], "content": text}]
