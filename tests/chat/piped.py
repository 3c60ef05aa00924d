"""The program as a script runs it, through pipes."""

from __future__ import annotations

import os
import subprocess
import sys


def run(*arguments: str, text: str | None = None, cwd=None, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "mlx_linattn", *arguments],
        input=text,
        stdin=subprocess.DEVNULL if text is None else None,
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        timeout=120,
    )
