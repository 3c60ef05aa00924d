"""Compiles the text that MLX's CUDA back end would compile and reads what ptxas says about it. Needs nvcc, no GPU.

    python tests/msl/nvcc.py      every specialization that a published model could ask for; an hour on one core

prints for each kernel how many there are, the most registers that one takes, and those that use stack or spill.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import mlx.core as mx

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from mlx_linattn import metal
from mlx_linattn.ops import use_backend
from msl.emulator import CACHE
from msl.problems import Problem
from msl.step_problems import conv, diagonal, mixer, only_launch, selective, then_gate, then_norm

NVCC = shutil.which("nvcc")
_TYPES = {
    mx.float32: "float", mx.float16: "__half", mx.bfloat16: "__nv_bfloat16",
    mx.int32: "int32_t", mx.uint32: "uint32_t", mx.bool_: "bool",
}  # fmt: skip


class Recorder:
    """Stands where a CUDA kernel stands: writes down each launch's full source and returns zeros."""

    def __init__(self, name: str, s: metal.Source, made: dict):
        self.name, self.source, self.made = name.replace("/", "_"), s, made

    def __call__(self, *, inputs, template, output_shapes, output_dtypes, grid, threadgroup, **_):
        assert all(g % t == 0 for g, t in zip(grid, threadgroup)), f"{self.name}: the grid is not whole threadgroups"
        values = [(n, _TYPES[v] if isinstance(v, mx.Dtype) else str(v).lower()) for n, v in template]
        label = self.name + "".join(f" {n}={v}" for n, v in values)
        if label not in self.made:
            given = [f"const {_TYPES[a.dtype]}* {n}" for n, a in zip(self.source.inputs, inputs)]
            given += [f"{_TYPES[d]}* {n}" for n, d in zip(self.source.outputs, output_dtypes)]
            lines = [
                "#include <cstdint>",
                metal._text("cuda.h"),
                metal.cuda_words(self.source.header),
                "namespace mlx {",
            ]
            lines += [f"__global__ void {self.name}(", ",\n".join(given), ") {"]
            for (n, v), (_, value) in zip(values, template):
                kind = "bool" if isinstance(value, bool) else "int"
                lines.append(f"using {n} = {v};" if isinstance(value, mx.Dtype) else f"constexpr {kind} {n} = {v};")
            self.made[label] = "\n".join([*lines, metal.cuda_body(self.source.body), "}", "}"])
        return [mx.zeros(s, d) for s, d in zip(output_shapes, output_dtypes)]


def resources(source: str, arch: str = "sm_90") -> dict[str, int]:
    """Registers, bytes of stack and of spills of one kernel; remembered between runs, since nvcc takes seconds."""
    kept = CACHE / f"nvcc-{hashlib.sha1((arch + source).encode()).hexdigest()[:20]}.json"
    if not kept.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(_compile(source, arch)))
    return json.loads(kept.read_text())


def _compile(source, arch):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cu"
        path.write_text(source)
        command = [NVCC, "-std=c++17", f"-arch={arch}", "-O3", "-Xptxas", "-v", "-cubin", str(path), "-o", f"{path}.o"]
        result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(result.stderr[:3000])
    patterns = {
        "registers": r"Used (\d+) registers",
        "stack": r"(\d+) bytes stack",
        "stores": r"(\d+) bytes spill stores",
    }
    return {name: int(re.search(pattern, result.stderr)[1]) for name, pattern in patterns.items()}


DTYPES = (mx.float32, mx.float16, mx.bfloat16)
WIDTHS = range(32, 257, 32)


def every_launch():
    """(path or None, function that launches) over dtypes, head sizes, gates and options. What a kernel only multiplies
    addresses with (numbers of heads, Dv in the recurrences) is not varied."""
    for keys, gate, delta in product(DTYPES, ("scalar", "vector"), (True, False)):
        for Dk in WIDTHS:
            for path in ("packed", "simdgroup"):
                yield path, Problem(T=2, Hv=2, Dk=Dk, Dv=128, gate=gate, keys=keys, delta=delta).run
        for Dk, Dv in product((32, 64, 96, 128), (32, 128)):  # two warps a block and four
            heads = 2 if Dv == 32 else 66
            yield "tensor_core", Problem(T=2, Hv=heads, Dk=Dk, Dv=Dv, gate=gate, keys=keys, delta=delta).run
    for dtype, D, T, vector, snapshots in product(DTYPES, WIDTHS, (1, 2), (False, True), (False, True)):
        if not (snapshots and T == 1):
            yield None, mixer(1, T, 1, 2, D, D, dtype=dtype, vector=vector, snapshots=snapshots)
    published = {"lower_bound": -5.0, "beta_scale": 2.0, "output_gate": "sigmoid", "eps": 1e-5}
    for D, T, vector in product(WIDTHS, (1, 2), (False, True)):
        yield None, mixer(1, T, 1, 1, D, D, dtype=mx.bfloat16, vector=vector, **published)
        yield None, mixer(256, T, 1, 1, D, D, dtype=mx.bfloat16, vector=vector)  # fewer threads
    for Dk, Dv in ((96, 192), (128, 256), (192, 96), (256, 128), (64, 256)):
        yield None, mixer(1, 2, 1, 1, Dk, Dv, dtype=mx.bfloat16)
    yield None, mixer(1, 2, 1, 1, 128, 128, without=("a", "A_log", "dt_bias", "z"))
    for dtype in DTYPES:
        for T in (1, 9, 20, 40, 300):
            yield None, diagonal(1, T, 32, dtype=dtype)
        for N, skip in product((4, 8, 16, 32, 64), (True, False)):
            yield None, selective(1, 40, 32, N, skip=skip, dtype=dtype)
        for taps, T, plain in product(range(2, 9), (1, 9), (True, False)):
            yield None, conv(1, T, 32, taps, bias=plain, silu_after=plain, dtype=dtype)
        for D in (64, 128, 256, 600, 1024, 2048, 4096, 9000, 16384):
            yield None, then_norm((1, 1, D), dtype=dtype)
            for gate in ("silu", "sigmoid"):
                yield None, then_gate((1, 1, 2, D), gate, dtype=dtype)


def sources(launches, replace) -> dict[str, str]:
    """{label: source} of all that ``launches`` would compile; ``replace(name, value)`` sets an attribute of metal."""
    made: dict[str, str] = {}
    replace("kernel", lambda name, backend, _=0: Recorder(name, metal.source(name), made))
    for path, launch in launches:
        with use_backend("cuda", path):
            launch() if path else only_launch(launch)
    return made


def main() -> int:
    made = sources(every_launch(), lambda name, value: setattr(metal, name, value))
    used: dict[str, dict[str, int]] = {}
    with ThreadPoolExecutor(1) as pool:
        for i, (label, found) in enumerate(zip(made, pool.map(resources, made.values()))):
            used[label] = found
            print(f"\r{i + 1} of {len(made)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    kernels = sorted({label.split(" ")[0] for label in used})
    for kernel in kernels:
        mine = {label: u for label, u in used.items() if label.split(" ")[0] == kernel}
        in_memory = [label for label, u in mine.items() if u["stack"] or u["stores"]]
        most = max(u["registers"] for u in mine.values())
        print(f"{kernel:<22}{len(mine):5} specializations, at most {most:3} registers, {len(in_memory)} use memory")
        for label in in_memory:
            print(f"    {label}: {used[label]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
