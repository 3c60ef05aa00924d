"""Runs Metal kernels on a CPU: :class:`MetalKernelCPU` has the constructor and the call of ``mx.fast.metal_kernel``.

The text that is compiled is the one MLX itself would hand to Apple's compiler: MLX writes it while a call is traced for
export, which it allows on a machine without Metal. Two substitutions make it C++ (:func:`translate`).

What is checked besides the result: writes outside a buffer, writes to inputs, outputs and threadgroup memory that are
read or left unwritten (both start as NaN), threadgroup memory above 32 KB, SIMD-group operations or barriers that not
every thread reaches, deadlock. ``order`` and ``seed`` choose the order in which threads run; :data:`ORDERS` lists five.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import mlx.core as mx
import numpy as np

HERE = Path(__file__).parent
COMPILER = os.environ.get("MSL_CXX") or shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
SUPPORTED = platform.system() == "Linux" and platform.machine() in ("x86_64", "aarch64")
MISSING = (
    None
    if COMPILER and SUPPORTED
    else "the Metal emulator needs a C++ compiler (g++ or clang++) on x86-64 or arm64 Linux"
)
CACHE = Path(os.environ.get("MSL_CACHE") or Path(tempfile.gettempdir()) / f"mlx_linattn_msl_{os.getuid()}")
FLAGS = (
    "-std=c++17 -O2 -g0 -march=native -ffp-contract=on -fno-strict-aliasing -fno-exceptions -fPIC -shared -pthread -w"
).split()
# A literal like 0.5 is a float in Metal.
FLAGS += ["-cl-single-precision-constant" if "clang" in (COMPILER or "") else "-fsingle-precision-constant"]
MARGIN = 1 << 16  # bytes on both sides of every buffer that must stay as they are

#: Ascending, descending and shuffled threads; one SIMD-group as far as it goes, first to last and last to first.
ORDERS = ((0, 0), (1, 0), (2, 1), (3, 0), (4, 0))

ATTRIBUTES = {
    "thread_position_in_grid": "uint3(tg.x*j.threads.x+f.position.x,tg.y*j.threads.y+f.position.y,tg.z*j.threads.z+f.position.z)",
    "thread_position_in_threadgroup": "msl_uint3(f.position)",
    "threadgroup_position_in_grid": "msl_uint3(tg)",
    "thread_index_in_threadgroup": "f.id",
    "thread_index_in_simdgroup": "f.lane",
    "simdgroup_index_in_threadgroup": "f.id/32",
    "threads_per_threadgroup": "msl_uint3(j.threads)",
    "dispatch_threads_per_threadgroup": "msl_uint3(j.threads)",
    "threads_per_grid": "msl_uint3(j.grid)",
    "grid_size": "msl_uint3(j.grid)",
    "threadgroups_per_grid": "msl_uint3(j.groups)",
    "simdgroups_per_threadgroup": "(j.threads.x*j.threads.y*j.threads.z+31)/32",
    "threads_per_simdgroup": "32u",
    "thread_execution_width": "32u",
}
THREADGROUP = re.compile(
    r"\bthreadgroup\s+((?:[A-Za-z_]\w*(?:::\w+)*(?:<[^;{}]*?>)?\s+)+?)([A-Za-z_]\w*)\s*((?:\[[^\];]*\]\s*)+);"
)
PARAMETER = re.compile(
    r"(?:const\s+)?(device|constant)\s+(?:const\s+)?[\w:<>]+\s*([*&])\s*\w+\s*\[\[buffer\((\d+)\)[^\]]*\]\]"
    r"|\w+\s+\w+\s*\[\[(\w+)\]\]"
)


def traced_source(kernel_arguments: dict, options: dict, call: dict) -> str:
    """The exact Metal source that MLX would compile for this call."""
    function = mx.fast.metal_kernel(**kernel_arguments, **options)
    given = call["inputs"]
    arrays = [a for a in given if isinstance(a, mx.array)]

    def traced(*placeholders):
        left = iter(placeholders)
        inputs = [next(left) if isinstance(a, mx.array) else a for a in given]
        return function(**{**call, "inputs": inputs, "verbose": True})

    with tempfile.TemporaryDirectory() as folder:
        printed = _printed(lambda: mx.export_function(os.path.join(folder, "f.mlxfn"), traced, *arrays))
    return printed.split("```\n", 1)[1].rsplit("```", 1)[0]


def _printed(function) -> str:
    """What C++ code writes to standard output."""
    sys.stdout.flush()
    with tempfile.TemporaryFile() as file:
        kept = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            function()
        finally:
            os.dup2(kept, 1)
            os.close(kept)
        file.seek(0)
        return file.read().decode()


def translate(msl: str) -> tuple[str, int]:
    """Metal source of one kernel -> C++ for this machine, and how many buffers the kernel takes."""
    start = re.search(r"\[\[kernel\]\]\s*void\s+(\w+)\s*\(", msl)
    depth, end = 1, start.end()
    while depth:
        depth += {"(": 1, ")": -1}.get(msl[end], 0)
        end += 1
    arguments, buffers = [], 0
    for space, kind, index, attribute in PARAMETER.findall(msl[start.end() : end - 1]):
        if space:
            arguments.append(f"msl_rt::Any{'Reference' if kind == '&' else 'Pointer'}{{j.buffers[{index}]}}")
            buffers = max(buffers, int(index) + 1)
        else:
            arguments.append(ATTRIBUTES[attribute])
    instance = re.search(r"template \[\[host_name.*?decltype\(\w+(<.*?>)\)", msl, re.S)
    body = re.sub(r"template \[\[host_name.*?;\s*$", "", msl, flags=re.S | re.M)
    body = THREADGROUP.sub(lambda m: f"MSL_THREADGROUP({m[1].strip()}, {m[2]}, {m[3].strip()})", body)
    body = re.sub(r"\[\[[^\]]*(?:\([^)]*\))?[^\]]*\]\]", "", body)
    call = f"{start[1]}{instance[1] if instance else ''}({', '.join(arguments)})"
    return (
        f'#include "metal.hpp"\n#line 1 "kernel.metal"\n{body}\n'
        f"static void body(const msl_rt::Job& j, const msl_rt::Fiber& f, msl_rt::Size3 tg) {{ {call}; }}\n"
        'extern "C" int msl_run(void** b, const unsigned* g, const unsigned* t, int order, unsigned seed, int workers,'
        " unsigned long long* stats) {\n"
        "  msl_rt::Job j; j.body = body; j.buffers = b; j.order = order; j.seed = seed; j.grid = {g[0], g[1], g[2]};\n"
        "  j.threads = {std::min(t[0], g[0]), std::min(t[1], g[1]), std::min(t[2], g[2])};\n"
        "  int bad = msl_rt::launch(j, workers); stats[0] = msl_rt::total_collectives.exchange(0);\n"
        "  stats[1] = msl_rt::most_memory.exchange(0); return bad; }\n"
        'extern "C" const char* msl_error() { return msl_rt::failure; }\n'
    ), buffers


_headers: Path | None = None
_libraries: dict[str, ctypes.CDLL] = {}


def _header_folder() -> Path:
    """A folder with the emulator's headers, precompiled once: parsing them is most of a small kernel's compile time."""
    global _headers
    if _headers is None:
        text = b"".join((HERE / n).read_bytes() for n in ("runtime.hpp", "metal.hpp"))
        version = subprocess.run([COMPILER, "--version"], capture_output=True).stdout
        key = hashlib.sha1(text + version + " ".join(FLAGS).encode()).hexdigest()[:12]
        folder = CACHE / f"headers-{key}"
        if not folder.exists():
            CACHE.mkdir(parents=True, exist_ok=True)
            fresh = Path(tempfile.mkdtemp(dir=CACHE))
            for n in ("runtime.hpp", "metal.hpp"):
                shutil.copy(HERE / n, fresh / n)
            if "clang" not in COMPILER:
                flags = [f for f in FLAGS if f != "-shared"]
                subprocess.run(
                    [COMPILER, *flags, "-x", "c++-header", "metal.hpp", "-o", "metal.hpp.gch"], cwd=fresh, check=True
                )
            try:
                fresh.rename(folder)
            except OSError:  # another process was first
                shutil.rmtree(fresh)
        _headers = folder
    return _headers


def compile_kernel(msl: str) -> ctypes.CDLL:
    """A shared library of one kernel, from the cache where it was compiled before."""
    cpp, _ = translate(msl)
    folder = _header_folder()
    key = hashlib.sha1((cpp + folder.name + COMPILER).encode()).hexdigest()[:20]
    if key not in _libraries:
        library = CACHE / f"{key}.so"
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=CACHE) as work:
                path, built = Path(work) / "kernel.cpp", Path(work) / "kernel.so"
                path.write_text(cpp)
                command = [COMPILER, *FLAGS, f"-I{folder}", str(path), "-o", str(built)]
                result = subprocess.run(command, capture_output=True, text=True)
                if result.returncode:
                    raise RuntimeError("the kernel does not compile:\n" + result.stderr[:4000])
                built.rename(library)
        _libraries[key] = ctypes.CDLL(str(library))
    return _libraries[key]


def compile_all(sources) -> None:
    """Compile several kernels at once, so that tests find them in the cache. Errors are left to the test that runs them."""

    def attempt(msl):
        with suppress(RuntimeError):
            compile_kernel(msl)

    sources = list(sources)
    if sources:
        _header_folder()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(attempt, sources))


_NUMPY = {
    mx.bfloat16: np.uint16, mx.float32: np.float32, mx.float16: np.float16, mx.int32: np.int32,
    mx.uint32: np.uint32, mx.bool_: np.bool_, mx.int64: np.int64, mx.uint8: np.uint8,
}  # fmt: skip


def _as_numpy(a) -> np.ndarray:
    a = a if isinstance(a, mx.array) else mx.array(a)
    return np.ascontiguousarray(np.array(a.view(mx.uint16) if a.dtype == mx.bfloat16 else a))


class _Buffer:
    """Memory between two margins; every byte starts as 0xFF, which is NaN in every float type."""

    def __init__(self, size: int, content: np.ndarray | None = None):
        self.raw = np.full(size + 2 * MARGIN, 0xFF, np.uint8)
        self.size = size
        if content is not None:
            self.bytes[:] = np.frombuffer(content.tobytes(), np.uint8)

    @property
    def bytes(self):
        return self.raw[MARGIN : MARGIN + self.size]

    @property
    def address(self):
        return self.raw.ctypes.data + MARGIN

    def check(self, what: str) -> None:
        if (self.raw[:MARGIN] != 0xFF).any() or (self.raw[MARGIN + self.size :] != 0xFF).any():
            raise RuntimeError(f"write outside {what}")


class MetalKernelCPU:
    """``mx.fast.metal_kernel`` on a CPU. ``order``, ``seed`` and ``workers`` may be set on the object or in a call."""

    order, seed, workers = 0, 0, os.cpu_count() or 1

    def __init__(self, name, input_names, output_names, source, header="", **options):
        self.arguments = dict(
            name=name, input_names=input_names, output_names=output_names, source=source, header=header
        )
        self.options = options
        self.last: dict = {}
        self._sources: dict[str, str] = {}

    def metal_source(self, *, inputs, template=(), **call) -> str:
        """The source of the specialization that this call would use."""
        key = repr([(a.dtype, a.size < 8, a.ndim == 0) if isinstance(a, mx.array) else type(a) for a in inputs])
        key += repr(list(template)) + repr(call["output_dtypes"])
        if key not in self._sources:
            call = dict(call, inputs=inputs, template=list(template))
            self._sources[key] = traced_source(self.arguments, self.options, call)
        return self._sources[key]

    def __call__(
        self, *, inputs, output_shapes, output_dtypes, grid, threadgroup, template=(), init_value=None,
        order=None, seed=None, workers=None, verbose=False, stream=None,
    ):  # fmt: skip
        call = dict(output_shapes=output_shapes, output_dtypes=output_dtypes, grid=grid, threadgroup=threadgroup)
        msl = self.metal_source(inputs=inputs, template=template, **call)
        library, (_, count) = compile_kernel(msl), translate(msl)
        contents = [_as_numpy(a) for a in inputs]
        given = [_Buffer(a.nbytes, a) for a in contents]
        made = [_Buffer(int(np.prod(s)) * np.dtype(_NUMPY[d]).itemsize) for s, d in zip(output_shapes, output_dtypes)]
        if init_value is not None:
            for b, d in zip(made, output_dtypes):
                b.bytes[:] = np.frombuffer(_as_numpy(mx.full((b.size // d.size,), init_value, d)).tobytes(), np.uint8)
        assert len(given) + len(made) == count, f"{len(given)} inputs and {len(made)} outputs, the kernel takes {count}"
        buffers = (ctypes.c_void_p * count)(*[b.address for b in given + made])
        sizes = [(ctypes.c_uint * 3)(*s) for s in (grid, threadgroup)]
        stats = (ctypes.c_ulonglong * 2)()
        library.msl_error.restype = ctypes.c_char_p
        order, seed = self.order if order is None else order, self.seed if seed is None else seed
        if library.msl_run(buffers, *sizes, order, ctypes.c_uint(seed), workers or self.workers, stats):
            raise RuntimeError(library.msl_error().decode())
        self.last = dict(collectives=stats[0], threadgroup_memory=stats[1])
        for i, (b, content) in enumerate(zip(given, contents)):
            b.check(f"input {self.arguments['input_names'][i]}")
            if b.bytes.tobytes() != content.tobytes():
                raise RuntimeError(f"input {self.arguments['input_names'][i]} was written")
        results = []
        for i, (b, s, d) in enumerate(zip(made, output_shapes, output_dtypes)):
            b.check(f"output {self.arguments['output_names'][i]}")
            a = mx.array(b.bytes.view(_NUMPY[d]).reshape(s))
            results.append(a.view(mx.bfloat16) if d == mx.bfloat16 else a)
        return results
