"""Ranks that are processes of this machine, joined by MLX's ring, without ``mlx.launch`` between them and the test."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


def start_ranks(folder: Path, ranks: int, command: Callable[[int], list[str]], only=None) -> list[subprocess.Popen]:
    """``command(rank)`` (without the interpreter) as each of ``ranks`` ranks, or as those of ``only``."""
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(ranks)]))
    return [
        subprocess.Popen(
            [sys.executable, *command(rank)],
            env={**os.environ, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in (range(ranks) if only is None else only)
    ]  # fmt: skip


def results(processes: list[subprocess.Popen], within: float = 120) -> list[tuple[int, str, str]]:
    """(status, stdout, stderr) of each; whatever happens, none of them stays."""
    try:
        return [(p.returncode, out, err) for p in processes for out, err in [p.communicate(timeout=within)]]
    finally:
        for process in processes:
            process.kill()
