"""Runs the library's operations with their Metal kernels on the emulator."""

from __future__ import annotations

from contextlib import contextmanager

import mlx.core as mx
import numpy as np

from mlx_linattn import metal
from mlx_linattn.ops import use_backend

from . import emulator


@contextmanager
def emulated(order: int = 0, seed: int = 0, path: str | None = None, sources=metal.source, collect: list | None = None):
    """Inside, operations take their Metal kernels, and those run on the emulator in the given thread order.

    ``sources`` replaces the kernel texts (see :mod:`mutants`). With ``collect`` nothing runs: the Metal source of every
    launch is appended to it, and outputs are zeros.
    """
    made = {}

    def kernel(name, backend, shared_memory=0):
        if name not in made:
            s = sources(name)
            made[name] = emulator.MetalKernelCPU(
                name.replace("/", "_"), list(s.inputs), list(s.outputs), s.body, s.header
            )
        made[name].order, made[name].seed = order, seed
        return made[name] if collect is None else _collector(made[name], collect)

    original, metal.kernel = metal.kernel, kernel
    try:
        with use_backend("metal", path):
            yield made
    finally:
        metal.kernel = original


def _collector(kernel, collect):
    def launch(**call):
        collect.append(kernel.metal_source(**{n: v for n, v in call.items() if n != "init_value"}))
        return [mx.zeros(s, d) for s, d in zip(call["output_shapes"], call["output_dtypes"])]

    return launch


def compile_for(runs) -> None:
    """Compile the kernels of several functions at once; each function is called with ``collect`` ready."""
    collected: list[str] = []
    for run in runs:
        run(collected)
    emulator.compile_all(set(collected))


def as64(x) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def same_in_every_order(run) -> list[np.ndarray]:
    """``run(order, seed)`` -> arrays; they must have the same bits whatever the order of threads."""
    first = None
    for order, seed in emulator.ORDERS:
        got = [np.array(x.astype(mx.float32)) for x in run(order, seed)]
        if first is None:
            first = got
        for a, b in zip(first, got):
            assert a.tobytes() == b.tobytes(), f"the result depends on the order of threads (order {order})"
    return first
