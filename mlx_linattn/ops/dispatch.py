"""Which path each operation takes: one table, read from top to bottom, first match wins.

A row that names Metal or CUDA is a kernel and says in ``fits`` which shapes it takes; the rows for ANY device are plain
MLX and take everything. ``use_backend`` narrows the table to one backend's rows, and then to plain MLX.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from .backend import forced_backend, forced_path

NO_END = 1 << 62


class Call(NamedTuple):
    """What one call of an operation looks like to the table."""

    op: str
    T: int
    heads: int  # B * Hv, or B * channels / 32 where an operation has no heads
    Dk: int = 0
    Dv: int = 0
    gate: str = "none"  # "none", "scalar" or "vector"
    delta: bool = False
    dtype: mx.Dtype = mx.float32
    taps: int = 0  # of a convolution
    more: tuple = ()  # what only this operation's rows look at


@dataclass(frozen=True)
class Row:
    op: str
    devices: tuple[str, ...]
    gates: tuple[str, ...]
    tokens: tuple[int, int]  # first and last T
    heads: tuple[int, int]  # least and most B * Hv
    path: str
    options: dict = field(default_factory=dict, hash=False)
    fits: Callable[[Call], bool] = lambda call: True

    def takes(self, call: Call, device: str, measured: bool = True) -> bool:
        """``measured``: heed the ranges in which the path is the fastest, not only those in which it is right."""
        fast = self.tokens[0] <= call.T <= self.tokens[1] and self.heads[0] <= call.heads <= self.heads[1]
        right = call.op == self.op and call.gate in self.gates and device in self.devices and self.fits(call)
        return right and (fast or not measured)


def packed_fits(c: Call) -> bool:
    return c.Dk % 32 == 0 and c.Dk <= 256 and c.Dv % 8 == 0


def simdgroup_fits(c: Call) -> bool:
    return c.Dk % 32 == 0 and c.Dk <= 256 and c.Dv % 32 == 0


def step_fits(c: Call) -> bool:
    return c.T <= 8 and all(D % 32 == 0 and D <= 256 for D in (c.Dk, c.Dv)) and 2 <= c.taps <= 8


def conv_fits(c: Call) -> bool:
    return 2 <= c.taps <= 8


def norm_fits(c: Call) -> bool:
    return c.Dk <= 16384  # what the registers of 1,024 threads hold


def selective_fits(c: Call) -> bool:
    return c.Dk % 4 == 0 and c.Dk <= 64


def tensor_core_fits(c: Call) -> bool:
    return c.Dk in (32, 64, 96, 128) and c.Dv % 32 == 0


KERNEL, CUDA, CPU, ANY = ("metal", "cuda"), ("cuda",), ("cpu",), ("cpu", "metal", "cuda")
SCALAR, VECTOR, GATES = ("none", "scalar"), ("vector",), ("none", "scalar", "vector")
ALL = (1, NO_END)

TABLE = [
    #   op             devices gates   T              B*Hv  path            options        fits
    Row("recurrence",     CUDA,   GATES,  (64, NO_END),  ALL,  "tensor_core", {},            tensor_core_fits),
    Row("recurrence",     KERNEL, GATES,  (1, 31),       ALL,  "packed",      {},            packed_fits),
    Row("recurrence",     KERNEL, GATES,  (32, NO_END),  ALL,  "simdgroup",   {},            simdgroup_fits),
    Row("recurrence",     ANY,    GATES,  (1, 1),        ALL,  "step"),
    Row("recurrence",     ANY,    GATES,  (2, 3),        ALL,  "reference"),
    Row("recurrence",     ANY,    GATES,  (4, 8),        ALL,  "chunked",     {"chunk": 8}),
    Row("recurrence",     ANY,    VECTOR, (9, NO_END),   ALL,  "chunked",     {"chunk": 8}),
    Row("recurrence",     ANY,    SCALAR, (9, NO_END),   ALL,  "chunked",     {"chunk": 16}),
    Row("delta_mixer",    KERNEL, GATES,  (1, 8),        (1, 255), "fused_step", {"threads": 512}, step_fits),
    Row("delta_mixer",    KERNEL, GATES,  (1, 8),        (256, NO_END), "fused_step", {"threads": 128}, step_fits),
    Row("delta_mixer",    ANY,    GATES,  ALL,           ALL,  "composed"),
    Row("short_conv",     KERNEL, GATES,  ALL,           ALL,  "channels",    {},            conv_fits),
    Row("short_conv",     ANY,    GATES,  ALL,           ALL,  "taps"),
    Row("norm_then_gate", KERNEL, GATES,  ALL,           ALL,  "rows",        {},            norm_fits),
    Row("norm_then_gate", ANY,    GATES,  ALL,           ALL,  "plain"),
    Row("gate_then_norm", KERNEL, GATES,  ALL,           ALL,  "rows",        {},            norm_fits),
    Row("gate_then_norm", ANY,    GATES,  ALL,           ALL,  "plain"),
    Row("diagonal_scan",  KERNEL, GATES,  ALL,           ALL,  "segments"),
    Row("diagonal_scan",  ANY,    GATES,  ALL,           ALL,  "chunked_scan"),
    Row("selective_scan", KERNEL, GATES,  ALL,           ALL,  "staged",      {},            selective_fits),
    Row("selective_scan", ANY,    GATES,  ALL,           ALL,  "chunked_scan"),
]  # fmt: skip


def device() -> str:
    """ "metal", "cuda" or "cpu": where MLX computes now, or the backend that is forced."""
    if forced_backend() in ("metal", "cuda"):
        return forced_backend()
    if mx.default_device().type != mx.DeviceType.gpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def choose(call: Call) -> Row:
    """The row that serves this call.

    A forced kernel backend takes any of its kernels that is right for the call, the fastest first, before plain MLX.
    """
    return _choose(call, device(), forced_backend(), forced_path(), switched_off())


@lru_cache(maxsize=4096)  # a decode step asks some hundred times
def _choose(call, where, forced, path, off):
    if forced == "reference":
        return Row(call.op, ANY, GATES, ALL, ALL, "reference")
    rows = [r for r in TABLE if r.op == call.op]
    kernels = [r for r in rows if r.devices != ANY and forced != "mlx" and (forced or r.path not in off)]
    plain = [r for r in rows if r.devices == ANY]
    asked = [r for r in kernels + plain if r.path == path]
    for candidates, measured in ((asked, False), (kernels, True), (kernels if forced else (), False), (plain, True)):
        for row in candidates:
            if row.takes(call, where, measured):
                return row
    raise LookupError(f"no row of the dispatch table serves {call}")


# ---- kernels that `mlx-linattn doctor` found wrong on this machine


def switches_file() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mlx_linattn" / "kernels_off.json"


def machine() -> str:
    """What a verdict on a kernel holds for: another MLX or another GPU deserves a new one."""
    where = mx.device_info() if hasattr(mx, "device_info") else {}
    return f"{mx.__version__} {where.get('device_name', device())}"


@lru_cache(maxsize=1)
def switched_off() -> frozenset[str]:
    """Paths that doctor switched off here; none when its file is absent or unreadable."""
    try:
        return frozenset(json.loads(switches_file().read_text()).get(machine(), ()))
    except (OSError, ValueError, AttributeError):
        return frozenset()


def switch_off(paths) -> None:
    """Make these the paths that are off on this machine, in this process and later ones."""
    file = switches_file()
    try:
        known = json.loads(file.read_text())
    except (OSError, ValueError):
        known = {}
    known[machine()] = sorted(paths)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(known, indent=1))
    switched_off.cache_clear()
