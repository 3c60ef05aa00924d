"""Type-checks kernels with clang's own address spaces, so that a missing or a wrong qualifier does not compile."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

from .emulator import HERE, THREADGROUP, translate

CLANG = os.environ.get("MSL_LINT_CXX") or next(
    (c for c in (shutil.which(n) for n in ("clang++", *(f"clang++-{v}" for v in range(22, 15, -1)))) if c), None
)
OPTIONS = (
    "-std=c++17 -fsyntax-only -DMSL_LINT -cl-single-precision-constant -Wall -Wextra -Wconversion -Wno-sign-conversion "
    "-Wno-sign-compare -Wno-implicit-int-conversion -Wno-implicit-int-float-conversion -Wno-shorten-64-to-32 "
    "-Wno-unknown-attributes -Wno-unused-parameter -Wno-unused-function -Wno-unused-variable"
).split()


def lint(msl: str) -> str:
    """What clang says about one traced kernel; empty when it is clean."""
    name = re.search(r"\[\[kernel\]\]\s*void\s+(\w+)\s*\(", msl)[1]
    values = re.search(r"decltype\(\w+(<.*?>)\)", msl)
    cpp = translate(msl)[0].split("static void body")[0]
    if values:
        cpp += f"template decltype({name}{values[1]}) {name}{values[1]};\n"
    return _clang(cpp)


def lint_file(text: str) -> str:
    """What clang says about a whole .metal file, whose kernels stay templates."""
    text = re.sub(r"#include.*", "", text)
    text = THREADGROUP.sub(lambda m: f"MSL_THREADGROUP({m[1].strip()}, {m[2]}, {m[3].strip()})", text)
    return _clang('#include "metal.hpp"\n#line 1 "kernel.metal"\n' + re.sub(r"\[\[[^\]]*\]\]", "", text))


def _clang(cpp: str) -> str:
    command = [CLANG, *OPTIONS, "-isystem", str(HERE), "-x", "c++", "-"]
    return subprocess.run(command, input=cpp, capture_output=True, text=True).stderr
