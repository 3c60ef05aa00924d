"""The TCP connections of MLX's ring, looked at from outside: who is behind them, and whether they are still open.

MLX opens them and alone reads and writes them. What it leaves out: to notice a machine that is gone without a word, to
sleep while nothing comes, and to say which rank was lost.
"""

from __future__ import annotations

import json
import os
import select
import socket
from contextlib import suppress
from pathlib import Path

KEEP_ALIVE = (  # after 20 silent seconds a question every 10; after 4 without an answer the connection counts as lost
    ("TCP_KEEPIDLE", 20),
    ("TCP_KEEPALIVE", 20),  # macOS's name for the same
    ("TCP_KEEPINTVL", 10),
    ("TCP_KEEPCNT", 4),
    ("TCP_USER_TIMEOUT", 60_000),  # Linux: milliseconds until what was sent must have arrived
)


class Neighbours:
    """The two ranks beside this one (one, in a ring of two). Without a ring, nobody."""

    def __init__(self, rank: int):
        self.sockets: list[tuple[int, socket.socket]] = []  # (rank behind it, a second handle of MLX's own)
        hosts = _hosts()
        if len(hosts) < 2:
            return
        left, right = (rank - 1) % len(hosts), (rank + 1) % len(hosts)
        for one in _tcp_sockets():
            if _port(one.getsockname()) in hosts[rank]:
                self.sockets.append((left, one))
            elif _port(one.getpeername()) in hosts[right]:
                self.sockets.append((right, one))
            else:
                one.close()

    def keep_alive(self) -> None:
        for _, one in self.sockets:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEP_ALIVE:
                if hasattr(socket, name):
                    one.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def wait(self) -> None:
        """Sleep until something comes, or a connection ends: MLX's own waiting takes a processor core."""
        if self.sockets:
            select.select([one for _, one in self.sockets], [], [])

    def lost(self) -> list[int]:
        """The ranks whose connections have ended."""
        found = set()
        for rank, one in self.sockets:
            try:
                ended = one.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
            except BlockingIOError:
                ended = False
            except OSError:
                ended = True
            if ended:
                found.add(rank)
        return sorted(found)


def size() -> int:
    """Ranks of the ring that ``mlx.launch`` describes; 0 without one."""
    return len(_hosts())


def _hosts() -> list[list[int]]:
    """The ports at which each rank is called."""
    with suppress(KeyError, OSError, ValueError, TypeError, AttributeError):
        hosts = json.loads(Path(os.environ["MLX_HOSTFILE"]).read_text())
        return [[int(address.rpartition(":")[2]) for address in host] for host in hosts]
    return []


def _tcp_sockets() -> list[socket.socket]:
    found = []
    with suppress(OSError):
        for name in os.listdir("/dev/fd"):
            with suppress(OSError, ValueError):
                one = socket.socket(fileno=os.dup(int(name)))
                if (
                    one.family in (socket.AF_INET, socket.AF_INET6)
                    and one.type == socket.SOCK_STREAM
                    and one.getpeername()
                ):
                    found.append(one)
                else:
                    one.close()
    return found


def _port(address) -> int:
    return address[1]
