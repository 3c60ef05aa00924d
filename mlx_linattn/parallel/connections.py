"""MLX's own TCP connections to other ranks, looked at from outside: who is behind them, and whether they are still open.

MLX alone reads and writes them. What it leaves out: to notice a machine that is gone without a word, to
sleep while nothing comes, and to say which rank was lost.
"""

from __future__ import annotations

import json
import os
import select
import socket
import stat
from contextlib import suppress
from functools import cache
from pathlib import Path

KEEP_ALIVE = (  # after 20 silent seconds a question every 10; after 4 without an answer the connection counts as lost
    ("TCP_KEEPIDLE", 20),
    ("TCP_KEEPALIVE", 20),  # macOS's name for the same
    ("TCP_KEEPINTVL", 10),
    ("TCP_KEEPCNT", 4),
    ("TCP_USER_TIMEOUT", 60_000),  # Linux: milliseconds until what was sent must have arrived
)


KEPT_OPEN = ("MLX_HOSTFILE", "MLX_IBV_DEVICES", "JACCL_IBV_DEVICES", "NCCL_HOST_IP")  # set for a ring, JACCL, NCCL


class Connections:
    """Those to other ranks: what MLX opens while this is made and ``joined`` has not been called.

    A ring's carry all data, so that a rank can sleep until they bring some. JACCL and NCCL carry it by other ways, but keep
    connections of this kind open beside, and they end with the rank. MPI's are its own affair.
    """

    def __init__(self, rank: int):
        self.rank = rank
        self.sockets: list[tuple[int | None, socket.socket]] = []  # (rank behind it, a second handle of MLX's own)
        self._before = {addresses for addresses, one in _tcp_sockets() if one.close() is None}

    def joined(self) -> None:
        """All ranks are there now."""
        watched = any(name in os.environ for name in KEPT_OPEN)
        for addresses, one in _tcp_sockets():
            if addresses in self._before or not watched:
                one.close()
            else:
                self.sockets.append((self._behind(*addresses), one))
        self._keep_alive()

    def _behind(self, here: tuple, there: tuple) -> int | None:
        """In a ring, the rank at the other end."""
        hosts = _hosts()
        left, right = ((self.rank + step) % max(len(hosts), 1) for step in (-1, 1))
        if hosts and here[1] in hosts[self.rank]:
            return left
        return right if hosts and there[1] in hosts[right] else None

    def _keep_alive(self) -> None:
        for _, one in self.sockets:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEP_ALIVE:
                if hasattr(socket, name):
                    one.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def wait(self) -> None:
        """Sleep until something comes, or a connection ends: MLX's own waiting takes a processor core."""
        if self.sockets and _hosts():
            select.select([one for _, one in self.sockets], [], [])

    def lost(self) -> list[str]:
        """The ranks whose connections have ended, in words."""
        found = set()
        for rank, one in self.sockets:
            try:
                ended = one.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
            except BlockingIOError:
                ended = False
            except OSError:
                ended = True
            if ended:
                found.add("another rank" if rank is None else f"rank {rank}")
        return sorted(found)


def ring_size() -> int:
    """Ranks of the ring that ``mlx.launch`` describes; 0 without one."""
    return len(_hosts())


@cache
def _hosts() -> list[list[int]]:
    """The ports at which each rank of a ring is called."""
    with suppress(KeyError, OSError, ValueError, TypeError, AttributeError):
        hosts = json.loads(Path(os.environ["MLX_HOSTFILE"]).read_text())
        return [[int(address.rpartition(":")[2]) for address in host] for host in hosts]
    return []


def _tcp_sockets() -> list[tuple[tuple, socket.socket]]:
    """This process's connections: (own address, the other's), and a second handle."""
    found = []
    with suppress(OSError):
        for name in os.listdir("/dev/fd"):
            with suppress(OSError, ValueError):
                if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    one = socket.socket(fileno=os.dup(int(name)))
                    if (
                        one.family in (socket.AF_INET, socket.AF_INET6)
                        and one.type == socket.SOCK_STREAM
                        and _peer(one)
                    ):
                        found.append(((one.getsockname(), one.getpeername()), one))
                    else:
                        one.close()
    return found


def _peer(one: socket.socket):
    with suppress(OSError):
        return one.getpeername()
