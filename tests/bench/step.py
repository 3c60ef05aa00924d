"""The fused decode step and the scans on a GPU against the device's copy bandwidth.

    python tests/bench/step.py [--check] [--sweep]

--check first compares every kernel with float64 on this GPU (the cases of tests/msl). --sweep times the launch options.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import mlx.core as mx

sys.path.insert(0, str(Path(__file__).parent.parent))

from mlx_linattn import ops
from mlx_linattn.ops import mixer_kernels, scan_kernels


def milliseconds(f, inner=20, repeats=9, state=None):
    """Median of ``repeats`` evaluations of ``inner`` calls, so that the host is not what is timed.

    With ``state``, f takes what its last call returned as its state, so that no two calls run side by side.
    """

    def run():
        outputs, kept = [], state
        for _ in range(inner):
            out = f() if state is None else f(kept)
            kept = out if state is None else out[-len(state) :]
            outputs.append(out[0] if isinstance(out, (tuple, list)) else out)
        mx.eval(outputs, kept)

    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        mx.synchronize()
        times.append((time.perf_counter() - start) / inner)
    return statistics.median(times) * 1e3


def copy_bandwidth():
    """Bytes read and written a second by x + 1 over 1 GiB."""
    x = mx.zeros((1 << 28,))
    mx.eval(x)
    return 2 * x.nbytes / (milliseconds(lambda: x + 1, inner=4) * 1e-3)


def random(*shape, dtype=mx.bfloat16):
    return mx.random.normal(shape).astype(dtype)


def mixer_inputs(B, T=1, Hk=16, Hv=32, D=128, vector=False):
    C, gates = 2 * Hk * D + Hv * D, Hv * D if vector else Hv
    arrays = {
        "qkv": random(B, T, C), "a": random(B, T, gates), "b": random(B, T, Hv), "z": random(B, T, Hv * D),
        "conv_weight": random(C, 4), "window": random(B, 3, C), "A_log": mx.zeros((Hv,)), "dt_bias": mx.zeros((gates,)),
        "norm_weight": mx.ones((D,)), "state": random(B, Hv, D, D, dtype=mx.float32),
    }  # fmt: skip
    mx.eval(arrays)
    return arrays | {"key_heads": Hk, "value_heads": Hv, "key_dim": D, "value_dim": D}


def step(given, state, **options):
    """One token; ``state`` is the window and the matrix."""
    return launch(given | {"window": state[0], "state": state[1]}, **options)


def plain_step(given, state):
    return ops.delta_mixer(**given | {"window": state[0], "state": state[1]})


def start(given):
    return given["window"], given["state"]


def launch(given, **options):
    rest = {
        "lower_bound": None,
        "beta_scale": 1.0,
        "output_gate": "silu",
        "eps": 1e-6,
        "lengths": None,
        "snapshots": False,
    }
    return mixer_kernels.delta_step(**given, **rest, **options)


def moved(arrays, outputs):
    return sum(x.nbytes for x in [*arrays, *outputs] if isinstance(x, mx.array))


def decode(copy, sweep):
    options = [{"threads": 128}, {"threads": 512}]
    if sweep:
        options += [{"threads": t, "lanes": n} for n in (4, 8, 16, 32) for t in (128, 256, 512, 1024)]
    for vector in (False, True):
        for B in (1, 8, 64):
            given = mixer_inputs(B, vector=vector)
            size = moved(given.values(), launch(given))
            inner = 100 if B == 1 else 20
            for option in options if B != 8 else options[:2]:
                ms = milliseconds(partial(step, given, **option), inner, state=start(given))
                rate = size / ms * 1e3
                name = "KDA" if vector else "GDN"
                print(
                    f"step {name} B={B:3} {option}: {ms * 1e3:8.1f} us  {rate / 1e12:.2f} TB/s  {rate / copy:4.0%} of copy",
                    flush=True,
                )
            with ops.use_backend("mlx"):
                ms = milliseconds(partial(plain_step, given), inner // 4, state=start(given))
            print(f"step {'KDA' if vector else 'GDN'} B={B:3} plain MLX: {ms * 1e3:8.1f} us", flush=True)
    for T in (2, 4, 8):
        given = mixer_inputs(1, T)
        print(
            f"step GDN B=  1 T={T}: {milliseconds(partial(step, given), 100, state=start(given)) * 1e3:8.1f} us",
            flush=True,
        )


def scans(copy, sweep):
    for T in (1, 2048, 16384):
        for W in (2560, 512):
            a, u, h = random(1, T, W, dtype=mx.float32), random(1, T, W), random(1, W, dtype=mx.float32)
            mx.eval(a, u, h)
            size = moved([a, u, h], scan_kernels.diagonal(a, u, h, None))
            grid = [(g, n) for g in (4, 8, 16, 32) for n in (4, 8, 16)] if sweep and T > 1 else [(16, 8)]
            for groups, tokens in grid:
                ms = milliseconds(partial(scan_kernels.diagonal, a, u, h, None, groups, tokens), inner=20)
                rate = size / ms * 1e3
                print(
                    f"diagonal T={T:6} W={W} groups={groups:2} tokens={tokens:2}: {ms * 1e3:9.1f} us  {rate / copy:4.0%} of copy",
                    flush=True,
                )
        for inner in (1536, 5120):
            x, delta = random(1, T, inner), mx.abs(random(1, T, inner, dtype=mx.float32)) * 0.1
            B, C, D = random(1, T, 16), random(1, T, 16), random(inner)
            A, h = -mx.abs(random(inner, 16, dtype=mx.float32)), random(1, inner, 16, dtype=mx.float32)
            mx.eval(x, delta, B, C, D, A, h)
            grid = [(n, t) for n in (2, 4, 8, 16) for t in (8, 16, 32)] if sweep and T > 1 else [(4, 32)]
            for lanes, tokens in grid:
                ms = milliseconds(partial(scan_kernels.selective, x, delta, A, B, C, D, h, None, lanes, tokens), 5)
                print(
                    f"selective T={T:6} inner={inner} lanes={lanes:2} tokens={tokens:2}: {ms * 1e3:9.1f} us", flush=True
                )
            if T == 2048:
                with ops.use_backend("mlx"):
                    ms = milliseconds(partial(ops.selective_scan, x, delta, A, B, C, D, h), 1)
                print(f"selective T={T:6} inner={inner} plain MLX: {ms * 1e3:9.1f} us", flush=True)


def prefill(copy):
    x, weight = random(1, 4096, 8192), random(8192, 4)
    y, gate, w = random(1, 4096, 32, 128), random(1, 4096, 32, 128), mx.ones((128,))
    mx.eval(x, weight, y, gate, w)
    for name, f, arrays in (
        ("short_conv", lambda: ops.short_conv(x, weight), [x, x]),
        ("norm_then_gate", lambda: ops.norm_then_gate(y, w, gate, 1e-6, "silu"), [y, y, gate]),
        ("gate_then_norm", lambda: ops.gate_then_norm(x, mx.ones((8192,)), x, 1e-6, 8), [x, x]),
    ):
        for backend in ("cuda" if not mx.metal.is_available() else "metal", "mlx"):
            with ops.use_backend(backend):
                ms = milliseconds(f)
            rate = sum(a.nbytes for a in arrays) / ms * 1e3
            print(f"{name} T=4096 {backend}: {ms * 1e3:8.1f} us  {rate / copy:4.0%} of copy", flush=True)


def check():
    from msl.step_problems import CHECKS

    for kernel, cases in CHECKS.items():
        for name, case in cases.items():
            with ops.use_backend("metal" if mx.metal.is_available() else "cuda"):
                case()
            print(f"equals float64: {kernel}, {name}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    given = parser.parse_args()
    if given.check:
        check()
    copy = copy_bandwidth()
    print(f"mlx {mx.__version__}, {mx.default_device()}; copy {copy / 1e12:.2f} TB/s", flush=True)
    with ops.use_backend("metal" if mx.metal.is_available() else "cuda"):
        decode(copy, given.sweep)
        scans(copy, given.sweep)
    prefill(copy)
