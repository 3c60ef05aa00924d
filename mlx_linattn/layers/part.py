from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from ..cuts import Cut, Deal


class Ranks:
    """What layers ask of the ranks that a model is dealt out to. This class asks nobody: it is one rank alone.

    (With more, shapes come out right and numbers do not: enough to see what one of several ranks needs.)
    """

    def __init__(self, deal: Deal = Deal(0, 1)):  # noqa: B008 - frozen
        self.deal = deal

    def sum(self, x):
        """The sum of what each rank has."""
        return x

    def gather(self, x):
        """What each rank has, one behind the other along the last axis."""
        return mx.concatenate([x] * self.deal.ranks, axis=-1)

    def own(self, x):
        """This rank's share of the last axis of what all have."""
        if self.deal.ranks == 1:
            return x
        first, end = self.deal.range(x.shape[-1])
        return x[..., first:end]

    def mean_square(self, *arrays):
        """For each array the mean of its squares over the last axis and over all ranks, [..., 1] float32; alone, None."""
        if self.deal.ranks == 1:
            return (None,) * len(arrays)
        means = [mx.mean(mx.square(x.astype(mx.float32)), axis=-1, keepdims=True) for x in arrays]
        # One exchange for all of them: two that wait for nothing of each other could meet in another order elsewhere.
        total = self.sum(mx.concatenate(means, axis=-1)) / self.deal.ranks
        return mx.split(total, len(arrays), axis=-1)


ALONE = Ranks()


class Part(nn.Module):
    """A mixer or an MLP. On one rank of several it is a smaller layer, and the ranks' outputs add up to the layer's."""

    ranks = ALONE

    @staticmethod
    def share(spec, deal: Deal):
        """The spec of one rank's part of the layer ``spec``; raises Uneven."""
        raise NotImplementedError

    @staticmethod
    def cuts(spec) -> dict[str, Cut]:
        """What each rank has of the layer's parameters (or of the modules they lie in); it has all others whole."""
        raise NotImplementedError

    @staticmethod
    def state_cuts(spec) -> tuple[Cut | None, ...]:
        """The same of the arrays of a mixer's state, in order; the last entry is good for all that follow. None: whole."""
        raise NotImplementedError
