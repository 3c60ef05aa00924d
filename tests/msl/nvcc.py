"""Compiles the text that MLX's CUDA back end would compile and reads what ptxas says about it. Needs nvcc, no GPU."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import mlx.core as mx

from mlx_linattn import metal
from msl.emulator import CACHE

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
