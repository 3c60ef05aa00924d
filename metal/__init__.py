"""The kernel sources, and the one function that loads them.

Every ``.metal`` file here is complete Metal. MLX writes a kernel's signature itself from the arrays of a call, so the
loader takes a file apart: the text before the kernel, the names of its buffers in their order, and its body.
On an NVIDIA GPU the same body goes through ``mx.fast.cuda_kernel``, with ``cuda.h`` in place of the Metal library.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from typing import NamedTuple

import mlx.core as mx


class Source(NamedTuple):
    header: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    body: str


KERNEL = r"(?:template\s*<[^{{}};]*>\s*)?(?:\[\[kernel\]\]|__global__)\s*void\s+{}\s*\("
BUFFER = r"(const\s+)?(?:device\s+)?\w+\s*\*\s*(\w+)\s*(?:\[\[buffer|,|$)"


@cache
def source(name: str) -> Source:
    """``"file"`` for the kernel named like its file, or ``"file/kernel"``. Comments are gone: MLX hashes the text at every call."""
    file, _, kernel = name.partition("/")
    text = _text(f"{file}.metal" if f"{file}.metal" in _files() else f"{file}.cu")
    start = re.search(KERNEL.format(kernel or file), text)
    end = _closing(text, start.end(), "()")
    buffers = re.findall(BUFFER, text[start.end() : end])
    opening = text.index("{", end)
    header = re.sub(r"#include.*|using namespace metal;", "", text[: re.search(KERNEL.format(r"\w+"), text).start()])
    return Source(
        header=header.strip() + "\n" if header.strip() else "",
        inputs=tuple(n for const, n in buffers if const),
        outputs=tuple(n for const, n in buffers if not const),
        body=text[opening + 1 : _closing(text, opening + 1, "{}")].strip("\n"),
    )


@cache
def kernel(name: str, backend: str, shared_memory: int = 0):
    """A callable like those of ``mx.fast.metal_kernel`` for the kernel ``name`` (see :func:`source`); one a process.

    MLX compiles it once for each set of dtypes and template values. ``shared_memory``: bytes of dynamic threadgroup
    memory, CUDA only. The grid must be whole threadgroups: CUDA rounds it up and Metal does not.
    """
    s = source(name)
    return FACTORIES[backend](name.replace("/", "_"), s, shared_memory)


def _metal(name, s, _):
    return mx.fast.metal_kernel(
        name=name, input_names=list(s.inputs), output_names=list(s.outputs), source=s.body, header=s.header
    )


def _cuda(name, s, shared_memory):
    return mx.fast.cuda_kernel(
        name=name,
        input_names=list(s.inputs),
        output_names=list(s.outputs),
        source=cuda_body(s.body),
        header=_text("cuda.h") + cuda_words(s.header),
        shared_memory=shared_memory,
    )


#: How a backend builds a kernel. The tests put an emulator in the place of Metal.
FACTORIES = {"metal": _metal, "cuda": _cuda}

_THREADGROUP = re.compile(
    r"\bthreadgroup\s+((?:[A-Za-z_]\w*(?:::\w+)*(?:<[^;{}]*?>)?\s+)+?)([A-Za-z_]\w*)\s*((?:\[[^\];]*\]\s*)+);"
)


def cuda_words(text: str) -> str:
    """Metal's address-space words have no place in CUDA, and a macro named ``device`` would break ``__device__``."""
    return re.sub(r"\b(device|constant|thread|threadgroup)\s+(?=[\w:<]+[^;(){}=]*?[*&]|const\b)", "", text)


def cuda_body(body: str) -> str:
    """A kernel's body in the words of ``cuda.h``."""
    body = _THREADGROUP.sub(lambda m: f"__shared__ {m[1].strip()} {m[2]}{m[3].strip()};", body)
    return "METAL_POSITIONS\n" + cuda_words(body)


@cache
def _files() -> frozenset[str]:
    return frozenset(f.name for f in resources.files(__name__).iterdir())


@cache
def _text(file: str) -> str:
    text = (resources.files(__name__) / file).read_text()
    text = re.sub(r'#include "(.*?)"', lambda m: _text(m[1]), text)
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    text = re.sub(r"//[^\n]*", "", text)
    return re.sub(r"[ \t]*\n\s*", "\n", text)  # nor empty lines and indentation


def _closing(text: str, start: int, pair: str) -> int:
    depth, i = 1, start
    while depth:
        depth += {pair[0]: 1, pair[1]: -1}.get(text[i], 0)
        i += 1
    return i - 1
