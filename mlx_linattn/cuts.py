"""How a model is dealt out to several ranks: pure data, no MLX.

A layer is cut along its heads (or features): each rank has ``1/N`` of them, as a smaller layer of the same kind, and the
ranks' outputs add up to the layer's. Beside its parameters a layer class declares

    share(spec, deal)   the spec of one rank's smaller layer; raises Uneven where it does not come out even
    cuts(spec)          which axis of which parameter is cut, and into what; all others every rank has whole
"""

from __future__ import annotations

from dataclasses import dataclass

ROWS, COLUMNS = -2, -1  # of a matrix [..., out, in]; a vector's only axis is COLUMNS


class Uneven(Exception):
    """A number of heads or features that the ranks cannot share evenly. It says which; the layer stays whole."""


@dataclass(frozen=True)
class Deal:
    """Rank ``rank`` of ``ranks``."""

    rank: int
    ranks: int

    def even(self, count: int, what: str) -> int:
        """How many of ``count`` each rank has."""
        if count % self.ranks:
            raise Uneven(f"{count} {what} do not divide among {self.ranks} ranks")
        return count // self.ranks

    def spread(self, count: int, what: str) -> int:
        """As :meth:`even`; where there are fewer than ranks, several ranks have the same one."""
        if count < self.ranks and self.ranks % count == 0:
            return 1
        return self.even(count, what)

    def range(self, count: int) -> tuple[int, int]:
        """First and end of this rank's of ``count`` things in a row."""
        if count < self.ranks:
            first = self.rank * count // self.ranks
            return first, first + 1
        return self.rank * count // self.ranks, (self.rank + 1) * count // self.ranks


@dataclass(frozen=True)
class Block:
    """``heads`` pieces of ``width`` entries of an axis, which are dealt out whole."""

    heads: int
    width: int = 1

    @property
    def size(self) -> int:
        return self.heads * self.width


@dataclass(frozen=True)
class Cut:
    """An axis, counted from the end, that consists of blocks; a rank has its share of each, one behind the other."""

    axis: int
    blocks: tuple[Block, ...]

    @property
    def size(self) -> int:
        return sum(block.size for block in self.blocks)

    def ranges(self, deal: Deal, size: int | None = None) -> list[tuple[int, int]]:
        """(first, end) of what one rank has of the axis; ``size`` is its length where numbers are packed.

        Raises Uneven where the rank's part begins or ends inside a pack (a quantization group, say).
        """
        size = self.size if size is None else size
        found: list[tuple[int, int]] = []
        offset = 0
        for block in self.blocks:
            edges = [(offset + i * block.width) * size for i in deal.range(block.heads)]
            if any(edge % self.size for edge in edges):
                raise Uneven(
                    f"{self.size // size} packed numbers of {self.size} do not fall to one rank of {deal.ranks}"
                )
            first, end = (edge // self.size for edge in edges)
            if found and found[-1][1] == first:
                found[-1] = (found[-1][0], end)
            else:
                found.append((first, end))
            offset += block.size
        return found


def rows(*blocks: Block) -> Cut:
    """A projection whose outputs are dealt out; a vector beside it (its bias) too."""
    return Cut(ROWS, blocks)


def columns(*blocks: Block) -> Cut:
    """A projection whose inputs are dealt out: its outputs are summed, and its bias is the first rank's alone. Or a vector."""
    return Cut(COLUMNS, blocks)


def heads(*blocks: Block) -> Cut:
    """One matrix for each head, [heads, out, in]."""
    return Cut(-3, blocks)


def nested(prefix: str, cuts: dict[str, Cut]) -> dict[str, Cut]:
    """The cuts of a layer that is a part of another."""
    return {f"{prefix}.{name}": cut for name, cut in cuts.items()}
