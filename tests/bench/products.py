"""What a chain of small matrix products costs, with one row and with several: why a batch of a tiny model gains less on a GPU than it might.

    python tests/bench/products.py

62 products of 192 x 192, as many and as large as in a step of the demo; milliseconds for all, median of 30.
"""

from __future__ import annotations

import statistics
import time

import mlx.core as mx

PRODUCTS, WIDTH = 62, 192


def milliseconds(weights: list[mx.array], rows: int) -> float:
    x = mx.random.normal((rows, 1, WIDTH)).astype(weights[0].dtype)
    mx.eval(x)
    times = []
    for _ in range(35):
        began, y = time.perf_counter(), x
        for weight in weights:
            y = y @ weight.T
        mx.eval(y)
        times.append(time.perf_counter() - began)
    return statistics.median(times[5:]) * 1e3


if __name__ == "__main__":
    print(f"mlx {mx.__version__}, {mx.default_device()}")
    for dtype in (mx.float32, mx.bfloat16):
        weights = [mx.random.normal((WIDTH, WIDTH)).astype(dtype) * 0.05 for _ in range(PRODUCTS)]
        mx.eval(weights)
        for rows in (1, 2, 4, 8, 16):
            print(f"{str(dtype)[9:]:9}{rows:3} rows {milliseconds(weights, rows):8.3f} ms", flush=True)
