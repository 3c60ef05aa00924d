"""Prefill of the recurrent layers whose state is one number per channel, against mlx_lm's loops over tokens.

    python tests/bench/scans.py [--tokens 2048] [--long 16384]

Weights are shared, inputs are random, times are medians in one process. "scan" is the recurrence (with Mamba-1's projections
of each token, which are inside mlx_lm's loop); "mixer" is the whole layer, at 128 tokens, with mlx_lm's depthwise
convolution on its side and short_conv on ours.
"""

from __future__ import annotations

import argparse
import statistics
import time

import mlx.core as mx
import mlx.nn as nn

from mlx_linattn import ops


def milliseconds(f, repeats=3):
    """Median wall time, and on a CPU median processor time, which says more on a busy machine."""
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    mx.eval(f())
    times = []
    for _ in range(repeats):
        start, used = time.perf_counter(), time.process_time()
        mx.eval(f())
        times.append((1e3 * (time.perf_counter() - start), 1e3 * (time.process_time() - used) if on_cpu else 0.0))
    return [statistics.median(x) for x in zip(*times)]


def rg_lru(width, heads=8):
    """(scan, mixer) pairs of functions of T: mlx_lm's and ours."""
    from mlx_lm.models import recurrent_gemma as stock

    block = stock.RecurrentBlock(width, heads, width)
    unit = block.rg_lru
    for module in (block.conv_1d, unit):
        module.update({n: mx.random.normal(p.shape) * 0.1 for n, p in module.parameters().items()})
    mx.eval(block.parameters())

    def gates(x):  # as RGLRU.__call__, up to its scan
        B, T, _ = x.shape

        def gate(w, b):
            h = x.reshape(B, T, heads, -1).swapaxes(1, 2) @ w
            return mx.sigmoid((h.swapaxes(1, 2) + b).flatten(2, 3))

        log_a = -8.0 * gate(unit.recurrent_gate_weight, unit.recurrent_gate_bias) * nn.softplus(unit.recurrent_param)
        scaled = x * gate(unit.input_gate_weight, unit.input_gate_bias) * mx.sqrt(1 - mx.exp(2 * log_a))
        return mx.exp(log_a), scaled

    def ours(x):
        y = nn.gelu_approx(block.linear_y(x))
        x = block.linear_x(x)
        x, window = ops.short_conv(x, block.conv_1d.weight[..., 0], block.conv_1d.bias, silu=False)
        h, state = ops.diagonal_scan(*gates(x))
        return block.linear_out(h * y), window, state

    def scan(T):
        a, u = mx.random.uniform(shape=(1, T, width)), mx.random.normal((1, T, width))
        mx.eval(a, u)
        return lambda: stock.rnn_scan(u, a, mx.zeros((1, width))), lambda: ops.diagonal_scan(a, u)

    def mixer(T):
        x = mx.random.normal((1, T, width))
        mx.eval(x)
        return lambda: block(x), lambda: ours(x)

    return scan, mixer


def mamba(hidden, inner, N=16):
    from mlx_lm.models import mamba as stock

    rank = hidden // 16
    args = stock.ModelArgs(
        model_type="mamba", vocab_size=8, hidden_size=hidden, intermediate_size=inner, state_size=N, num_hidden_layers=1,
        conv_kernel=4, use_bias=False, use_conv_bias=True, time_step_rank=rank,
    )  # fmt: skip
    block = stock.MambaBlock(args)
    block.conv1d.weight = mx.random.normal(block.conv1d.weight.shape)
    mx.eval(block.parameters())

    def selective(x):
        delta, B, C = mx.split(block.x_proj(x), [rank, rank + N], axis=-1)
        return ops.selective_scan(x, nn.softplus(block.dt_proj(delta)), -mx.exp(block.A_log), B, C, block.D)

    def ours(x):
        x, z = mx.split(block.in_proj(x), 2, axis=-1)
        x, window = ops.short_conv(x, block.conv1d.weight[..., 0], block.conv1d.bias)
        y, state = selective(x)
        return block.out_proj(nn.silu(z) * y), window, state

    def scan(T):
        x, A = mx.random.normal((1, T, inner)), -mx.exp(block.A_log)
        mx.eval(x, A)

        def loop():  # as MambaBlock._process_sequence
            state, outputs = None, []
            for t in range(T):
                y, state = block.ssm_step(x[:, t], A, state)
                outputs.append(y)
            return mx.stack(outputs, axis=1), state

        return loop, lambda: selective(x)

    def mixer(T):
        x = mx.random.normal((1, T, hidden))
        mx.eval(x)
        return lambda: block._process_sequence(x, None, None), lambda: ours(x)

    return scan, mixer


#: name, and its (scan, mixer); sizes of RecurrentGemma-2B, of one eighth of it, of Mamba-130m and of Mamba-2.8B.
LAYERS = [
    ("RG-LRU, width 2560", lambda: rg_lru(2560)),
    ("RG-LRU, width 512", lambda: rg_lru(512)),
    ("Mamba-1, inner 512", lambda: mamba(256, 512)),
    ("Mamba-1, inner 1536", lambda: mamba(768, 1536)),
]


def table(tokens, long):
    print("milliseconds of wall / processor time")
    for name, build in LAYERS:
        for what, pair in zip(("scan", "mixer"), build()):
            T = tokens if what == "scan" else min(tokens, 128)  # mlx_lm's convolution is slow on a CPU
            theirs, ours = (milliseconds(f) for f in pair(T))
            gain = " / ".join(f"{a / b:.1f}x" for a, b in zip(theirs, ours) if b)
            line = f"{name:20} {what:5} T={T}: mlx_lm {_both(theirs)}  ours {_both(ours)}  {gain}"
            if what == "scan":
                longer = milliseconds(pair(long)[1], 1)
                growth = " / ".join(f"{a / b / (long / T):.2f}" for a, b in zip(longer, ours) if b)
                line += f"   T={long}: {_both(longer)}, {growth} of linear"
            print(line, flush=True)


def _both(times):
    return f"{times[0]:.1f} / {times[1]:.1f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--long", type=int, default=16384)
    given = parser.parse_args()
    print(f"mlx {mx.__version__}, {mx.default_device()}, float32")
    table(given.tokens, given.long)
