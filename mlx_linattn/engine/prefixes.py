"""States that later requests go on from: a radix tree over token ids.

A node stands for the tokens from its parent's end to its own. It holds what attention layers keep of those tokens alone, and
perhaps a checkpoint: the recurrent state after the last of them. So prompts that begin alike share memory, and a state can be
put together at every checkpoint. Where memory is full, the checkpoint that was used longest ago goes first, and with it the
tokens that lead to no checkpoint any more. The engine's thread alone touches it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..model import Model
from ..state import KVOptions, KVPiece, ModelState


@dataclass(eq=False)
class Node:
    tokens: tuple[int, ...]  # its own
    parent: Node | None
    end: int  # tokens from the root to its end
    pieces: list[KVPiece] = field(default_factory=list)  # of its tokens
    checkpoint: tuple[Any, ...] | None = None  # the layers of a Snapshot
    used: int = 0
    children: dict[int, Node] = field(default_factory=dict)  # by first token

    @property
    def path(self) -> list[Node]:
        """The nodes from below the root to this one."""
        found, node = [], self
        while node.parent:
            found.append(node)
            node = node.parent
        return found[::-1]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> Iterator[mx.array]:
        for piece in self.pieces:
            yield from piece.arrays
        for part in self.checkpoint or ():
            if not isinstance(part, int):
                yield from (array for array in part if array is not None)


@dataclass(frozen=True)
class Found:
    """state: holds the first ``state.offset`` tokens; None where no checkpoint lies on the way.

    parting: how many tokens something that was read before begins with in common, checkpoint or not.
    """

    state: ModelState | None
    parting: int


class Prefixes:
    """``room``: bytes that may be held."""

    def __init__(self, model: Model, options: KVOptions, room: int):
        self._model, self._options, self.room = model, options, room
        self.root = Node((), None, 0)
        self._clock = 0
        self.nbytes = self.lookups = self.hits = 0

    def find(self, tokens: Sequence[int]) -> Found:
        """The longest state that is a proper prefix of ``tokens``: one at least must be read, for its logits."""
        self.lookups += 1
        tokens = tuple(tokens)
        node, matched = self._walk(tokens)
        while node.parent and (node.checkpoint is None or node.end >= len(tokens)):
            node = node.parent
        if not node.parent:
            return Found(None, matched)
        self.hits += 1
        path = node.path
        # The first checkpoint, where a system prompt ends, serves every conversation that begins there.
        self._touch(next(one for one in path if one.checkpoint is not None))
        self._touch(node)
        state = self._model.make_cache(self._options)
        state.assemble(node.checkpoint, [one.pieces for one in path], node.end)
        mx.eval(state.arrays)
        return Found(state, matched)

    def insert(self, tokens: Sequence[int], state: ModelState) -> None:
        """Keep ``state``, one row that has read exactly ``tokens``. It is copied; what had been read before is shared."""
        tokens = tuple(tokens)
        node, matched = self._walk(tokens)
        if not tokens:
            return
        if node.end == len(tokens) and node.checkpoint is not None:
            self._touch(node)
            return
        snapshot, pieces = state.snapshot(), state.cut(matched, len(tokens))  # not evaluated yet
        if snapshot.nbytes + sum(array.nbytes for piece in pieces for array in piece.arrays) > self.room:
            return
        if matched > node.end:
            node = self._split(node.children[tokens[node.end]], matched)
        if matched < len(tokens):
            node = self.add(node, tokens[matched:], pieces)
        node.checkpoint = snapshot.layers
        mx.eval(list(node.arrays()))
        self.nbytes += snapshot.nbytes
        self._touch(node)
        self.shrink(self.room)

    def add(
        self, parent: Node, tokens: tuple[int, ...], pieces: list[KVPiece], checkpoint: Any = None, used: int = 0
    ) -> Node:
        """A node for ``tokens`` behind ``parent``, none of whose children begins with the same token."""
        node = Node(tokens, parent, parent.end + len(tokens), pieces, checkpoint, used)
        parent.children[tokens[0]] = node
        self._clock = max(self._clock, used)
        self.nbytes += node.nbytes
        return node

    def shrink(self, room: int) -> None:
        """Give up checkpoints until no more than ``room`` bytes are held."""
        while self.nbytes > room:
            oldest = min((node for node in self.nodes() if node.checkpoint is not None), key=lambda node: node.used)
            self._forget(oldest)

    def clear(self) -> None:
        self.root, self.nbytes = Node((), None, 0), 0

    def _walk(self, tokens: tuple[int, ...]) -> tuple[Node, int]:
        """The last node whose tokens all match, and how many tokens match, a part of one of its children's among them."""
        node, matched = self.root, 0
        while child := node.children.get(tokens[matched]) if matched < len(tokens) else None:
            shared = _shared(child.tokens, tokens[matched : matched + len(child.tokens)])
            matched += shared
            if shared < len(child.tokens):
                break
            node = child
        return node, matched

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node's tokens in two; returns the upper one, which ends after ``at`` tokens and has no checkpoint yet."""
        parent, columns = node.parent, at - node.parent.end
        upper = [piece.cut(0, columns) for piece in node.pieces]
        node.pieces = [piece.cut(columns, len(node.tokens)) for piece in node.pieces]
        above = Node(node.tokens[:columns], parent, at, upper, children={node.tokens[columns]: node})
        parent.children[node.tokens[0]] = above
        node.tokens, node.parent = node.tokens[columns:], above
        mx.eval(list(above.arrays()), list(node.arrays()))
        return above

    def _forget(self, node: Node) -> None:
        """Give up a checkpoint, and the nodes that led to it alone."""
        held = node.nbytes
        node.checkpoint = None
        self.nbytes -= held - node.nbytes
        while node.parent and node.checkpoint is None and not node.children:
            self.nbytes -= node.nbytes
            del node.parent.children[node.tokens[0]]
            node = node.parent

    def nodes(self) -> Iterator[Node]:
        waiting = list(self.root.children.values())
        while waiting:
            node = waiting.pop()
            waiting += node.children.values()
            yield node

    def _touch(self, node: Node) -> None:
        self._clock += 1
        node.used = self._clock


def _shared(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return len(a) if a == b else next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
