"""Ranks that are threads of one process: the same layers and cuts, without a network."""

from __future__ import annotations

import threading
from collections.abc import Callable

import mlx.core as mx

from mlx_linattn.cuts import Deal
from mlx_linattn.layers import Ranks


class Threads(Ranks):
    def __init__(self, rank: int, table: list, barrier: threading.Barrier):
        super().__init__(Deal(rank, len(table)))
        self.table, self.barrier = table, barrier

    def _all(self, x) -> list:
        mx.eval(x)
        self.table[self.deal.rank] = x
        self.barrier.wait(60)
        found = list(self.table)
        self.barrier.wait(60)
        return found

    def sum(self, x):
        total, *others = self._all(x)
        for other in others:
            total = total + other
        mx.eval(total)
        return total

    def gather(self, x):
        return mx.concatenate(self._all(x), axis=-1)


def on_ranks(count: int, work: Callable[[Ranks], object]) -> list:
    """What ``work`` returns on each of ``count`` ranks."""
    table, barrier, results, errors = [None] * count, threading.Barrier(count), [None] * count, []

    def run(rank: int) -> None:
        try:
            results[rank] = work(Threads(rank, table, barrier))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results
