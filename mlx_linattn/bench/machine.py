"""What a measurement depends on besides the model: the machine, the versions, and how fast memory is here."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from .. import budget
from ..figures import at_rest
from ..model import Model
from ..ops import dispatch
from ..state import KVState, ModelState, WindowState

PACKAGES = ("mlx-linattn", "mlx", "mlx-lm")


def describe() -> dict:
    """The machine and the versions that measurements are only comparable within."""
    return {
        "device": dispatch.device(),
        "name": _name(),
        "cores": os.cpu_count(),
        "memory": budget.working_set(),
        "system": f"{platform.system()} {platform.machine()}",
        "blas": _blas(),
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }


def load() -> float | None:
    """Processes that wanted to run, on average over the last minute."""
    return round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None


def sentence(machine: dict) -> str:
    blas = f", {machine['blas']}" if machine["blas"] else ""
    versions = ", ".join(f"{name.replace('-', '_')} {machine[name]}" for name in PACKAGES if machine[name])
    cores = f", {machine['cores']} cores" if machine["device"] == "cpu" else ""
    return f"{machine['name']} ({machine['device']}{cores}), {machine['system']}{blas}; Python {machine['python']}, {versions}"


def _name() -> str:
    if dispatch.device() != "cpu" and hasattr(mx, "device_info"):
        return str(mx.device_info().get("device_name", "GPU"))
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _blas() -> str:
    """On a Linux CPU the BLAS in use decides the speed of prefill."""
    if dispatch.device() != "cpu" or platform.system() != "Linux":
        return ""
    try:
        maps = Path("/proc/self/maps").read_text()  # numpy's own copy, libscipy_openblas, is not MLX's
        return "OpenBLAS" if "/libopenblas" in maps else "MLX's own BLAS"
    except OSError:
        return ""


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def traffic(model: Model, state: ModelState) -> int:
    """Bytes that the next token cannot do without: weights read, recurrent states read and written, the attended context read."""
    arrays = dict(tree_flatten(model.parameters()))
    weights = sum(array.nbytes for array in arrays.values()) - at_rest(model, lambda array: array.nbytes)
    if not model.spec.tied:  # a token reads one row
        weights -= sum(array.nbytes for name, array in arrays.items() if name.startswith("embed."))
    total = weights
    for layer in state:
        if isinstance(layer, KVState):
            total += sum(array.nbytes // array.shape[2] for array in layer.state) * layer.length
        elif isinstance(layer, WindowState):
            total += layer.nbytes * min(state.offset, layer.size) // layer.size
        else:
            total += 2 * layer.nbytes
    return total
