"""``mlx-linattn doctor``: does every kernel equal its reference on this machine, and how fast does it run?

A kernel that disagrees or does not compile is switched off for this machine (``ops/dispatch.py: switch_off``), and the
library takes its plain MLX path from then on.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import mlx.core as mx

from . import ops
from .ops import dispatch


class Check(NamedTuple):
    op: str
    path: str
    what: str
    run: Callable[[], tuple]  # -> arrays of real tokens only
    within: float  # largest error, relative to the largest number


def checks(device: str) -> Iterator[Check]:
    """One or more small inputs for each kernel that the dispatch table has on this device."""
    paths = dict.fromkeys((row.op, row.path) for row in dispatch.TABLE if row.devices != dispatch.ANY)
    here = {(r.op, r.path) for r in dispatch.TABLE if r.devices != dispatch.ANY and device in r.devices}
    for op, path in paths:
        if (op, path) in here:
            for what, run, within in INPUTS[op]():
                yield Check(op, path, what, run, 1e-4 if path == "tensor_core" and within < 1e-4 else within)


def _random(*shape, seed=0, dtype=mx.float32):
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def _unit(x):
    return x / mx.linalg.norm(x, axis=-1, keepdims=True)


def _recurrence():
    for gate in ("scalar", "vector"):
        for delta in (True, False):
            for dtype, within in ((mx.float32, 1e-5), (mx.bfloat16, 1e-2)):
                B, T, Hk, Hv, Dk, Dv = 2, 70, 2, 4, 64, 64
                q, k = (_unit(_random(B, T, Hk, Dk, seed=i)).astype(dtype) for i in (1, 2))
                decay = mx.exp(-0.1 * mx.exp(_random(B, T, Hv, *([Dk] if gate == "vector" else []), seed=3)))
                beta = 2 * mx.sigmoid(_random(B, T, Hv, seed=4))
                given = (q, k, _random(B, T, Hv, Dv, dtype=dtype), decay, beta, _random(B, Hv, Dv, Dk, seed=5))
                what = f"{gate} decay, {'delta rule' if delta else 'no delta'}, {_name(dtype)}"
                yield what, partial(ops.recurrence, *given, delta=delta), within


def _delta_mixer():
    for vector in (False, True):
        B, T, Hk, Hv, D = 2, 3, 2, 4, 64
        C, gates = 2 * Hk * D + Hv * D, Hv * D if vector else Hv
        run = partial(
            ops.delta_mixer, _random(B, T, C), _random(B, T, gates, seed=1), _random(B, T, Hv, seed=2),
            _random(B, T, Hv * D, seed=3), conv_weight=_random(C, 4, seed=4), window=_random(B, 3, C, seed=5),
            A_log=_random(Hv, seed=6), dt_bias=_random(gates, seed=7), norm_weight=_random(D, seed=8),
            state=_random(B, Hv, D, D, seed=9), key_heads=Hk, value_heads=Hv, key_dim=D, value_dim=D,
        )  # fmt: skip
        yield f"{'vector' if vector else 'scalar'} decay, {T} tokens", run, 1e-4


def _short_conv():
    yield "9 tokens", partial(ops.short_conv, _random(2, 9, 96), _random(96, 4, seed=1), _random(96, seed=2)), 1e-5


def _norm_then_gate():
    given = (_random(2, 5, 4, 96), _random(96, seed=1), _random(2, 5, 4, 96, seed=2))
    yield "silu", lambda: (ops.norm_then_gate(*given, 1e-6, "silu"),), 1e-5


def _gate_then_norm():
    given = (_random(2, 5, 192), _random(192, seed=1), _random(2, 5, 192, seed=2))
    yield "2 groups", lambda: (ops.gate_then_norm(*given, 1e-6, 2),), 1e-5


def _diagonal_scan():
    given = (mx.sigmoid(_random(2, 150, 40)), _random(2, 150, 40, seed=1), _random(2, 40, seed=2))
    yield "150 tokens", partial(ops.diagonal_scan, *given), 1e-5


def _selective_scan():
    delta, A = mx.abs(_random(2, 70, 40, seed=1)) * 0.1, -mx.abs(_random(40, 16, seed=2))
    given = (_random(2, 70, 40), delta, A, _random(2, 70, 16, seed=3), _random(2, 70, 16, seed=4), _random(40, seed=5))
    yield "70 tokens", partial(ops.selective_scan, *given), 1e-4


INPUTS = {
    "recurrence": _recurrence,
    "delta_mixer": _delta_mixer,
    "short_conv": _short_conv,
    "norm_then_gate": _norm_then_gate,
    "gate_then_norm": _gate_then_norm,
    "diagonal_scan": _diagonal_scan,
    "selective_scan": _selective_scan,
}


def error_of(check: Check, device: str) -> float:
    """The largest difference from the reference, relative to the reference's largest number; NaN counts as infinite."""
    with ops.use_backend("reference"):
        want = [x.astype(mx.float32) for x in check.run()]
    with ops.use_backend(device, check.path):
        got = [x.astype(mx.float32) for x in check.run()]
    worst = 0.0
    for a, b in zip(got, want):
        error = (mx.abs(a - b).max() / mx.maximum(mx.abs(b).max(), 1e-9)).item()
        worst = max(worst, error if error == error else float("inf"))
    return worst


def verdicts(device: str, write=print) -> set[str]:
    """Run all checks, one line a kernel; the paths that are wrong here."""
    wrong, worst = set(), {}
    for check in checks(device):
        name = (check.op, check.path)
        try:
            error = error_of(check, device)
            problem = None if error <= check.within else f"off by {error:.1e} ({check.what})"
        except Exception as e:  # whatever a compiler or a driver throws is a verdict on the kernel
            problem = f"{type(e).__name__}: {' '.join(str(e).split())[:160]} ({check.what})"
            error = float("inf")
        worst[name] = (max(error, worst.get(name, (0.0, None))[0]), problem or worst.get(name, (0, None))[1])
        if problem:
            wrong.add(check.path)
    for (op, path), (error, problem) in worst.items():
        write(f"  {op:<15} {path:<12} {problem or f'equals the reference (largest error {error:.0e})'}")
    return wrong


def _seconds(f, inner: int, repeats: int = 7) -> float:
    mx.eval(f())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        mx.eval([f() for _ in range(inner)])
        mx.synchronize()
        times.append((time.perf_counter() - start) / inner)
    return statistics.median(times)


def bandwidth() -> float:
    """Bytes read and written a second by x + 1 over 256 MB (64 MB on a CPU)."""
    x = mx.zeros(((1 << 26) if dispatch.device() != "cpu" else (1 << 24),))
    mx.eval(x)
    return 2 * x.nbytes / _seconds(lambda: x + 1, 4)


def decode_share(copy: float) -> tuple[float, float]:
    """Seconds of one token's recurrence for 8 rows of 32 heads of 128 x 128, and its share of the copy bandwidth."""
    B, Hk, Hv, D = 8, 16, 32, 128
    q, k, v = _random(B, 1, Hk, D), _unit(_random(B, 1, Hk, D, seed=1)), _random(B, 1, Hv, D)
    given = (q, k, v, mx.full((B, 1, Hv), 0.9), mx.full((B, 1, Hv), 0.5), _random(B, Hv, D, D))
    seconds = _seconds(partial(ops.recurrence, *given, delta=True), 10)
    return seconds, 2 * given[-1].nbytes / seconds / copy


def taken(device: str) -> Iterator[str]:
    """Which path an operation takes here, for one token and for a long prompt."""
    for op in dict.fromkeys(row.op for row in dispatch.TABLE):
        calls = [dispatch.Call(op, T, 32, 128, 128, "scalar", True, mx.bfloat16, 4) for T in (1, 4096)]
        one, many = (dispatch.choose(call).path for call in calls)
        yield f"  {op:<15} one token: {one:<12} 4096 tokens: {many}"


def main(argv: list[str] | None = None) -> int:
    """0 when every kernel of this device equals its reference, 1 when one was switched off."""
    parser = argparse.ArgumentParser(prog="mlx-linattn doctor", description="Check the kernels on this machine.")
    parser.add_argument("--keep", action="store_true", help="switch nothing off (default: off)")
    keep = parser.parse_args(argv).keep

    device = dispatch.device()
    print(f"{_device_name()}, {platform.system()} {platform.machine()}, Python {platform.python_version()}")
    print(", ".join(f"{name} {_version(name)}" for name in ("mlx-linattn", "mlx", "mlx-lm")))
    if device == "cpu":
        print("no GPU is in use, so there are no kernels to check; every operation takes its plain MLX path")
        wrong = set()
    else:
        print(f"kernels ({device}):")
        wrong = verdicts(device)
        if not keep:
            dispatch.switch_off(wrong)
    print("paths:")
    for line in taken(device):
        print(line)
    copy = bandwidth()
    seconds, share = decode_share(copy)
    print(f"copy: {copy / 1e9:.0f} GB/s; one token's recurrence (8 x 32 heads of 128 x 128): {seconds * 1e6:.0f} us, {share:.0%} of copy")  # fmt: skip
    if device == "cpu" and platform.system() == "Linux":
        print(_blas_advice())
    if wrong:
        what = "would be switched off" if keep else "are switched off on this machine"
        kernels = ", ".join(sorted(wrong))
        print(f"warning: {kernels} {what}; please open an issue with the lines above", file=sys.stderr)
    return 1 if wrong else 0


def _blas_advice() -> str:
    a = _random(1024, 1024)
    mx.eval(a)
    rate = 2 * 1024**3 / _seconds(lambda: a @ a, 1, 3) / 1e9
    advice = "" if rate > 25 else "; a tuned BLAS is several times faster: LD_PRELOAD=/path/to/libopenblas.so.0"
    return f"matrix product: {rate:.0f} GFLOP/s in float32{advice}"


def _device_name() -> str:
    return str(mx.device_info().get("device_name", "CPU")) if hasattr(mx, "device_info") else str(mx.default_device())


def _name(dtype) -> str:
    return str(dtype).rpartition(".")[2]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"
