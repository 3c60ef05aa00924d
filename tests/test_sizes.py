"""Files stay readable in one sitting, and importing the library stays cheap."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LONGEST = 400
FILES = sorted(
    file.relative_to(ROOT).as_posix()
    for folder in ("mlx_linattn", "metal", "convert", "chat", "tests")
    for file in (ROOT / folder).rglob("*.py")
)


@pytest.mark.parametrize("name", FILES)
def test_no_module_is_long(name):
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= LONGEST


@pytest.mark.parametrize("use", ["", "; la.load_model('demo'), la.Session, la.generate, la.stream_generate"])
def test_import_brings_in_neither_mlx_lm_nor_transformers(use):
    program = [sys.executable, "-X", "importtime", "-c", f"import mlx_linattn as la{use}"]
    log = subprocess.run(program, capture_output=True, text=True, check=True).stderr
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in log.splitlines()}
    assert "mlx_linattn" in imported, "the log of imports cannot be read"
    assert not imported & {"mlx_lm", "transformers", "torch"}


def test_import_prints_nothing():
    run = subprocess.run([sys.executable, "-c", "import mlx_linattn"], capture_output=True, text=True, check=True)
    assert run.stdout + run.stderr == ""
