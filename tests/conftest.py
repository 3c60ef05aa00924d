"""What every test gets: the package as installed, no network, and golden fixtures."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

try:
    import mlx_linattn.chat  # noqa: F401 - in a checkout that is not installed, only mlx_linattn itself is importable
except ImportError:
    pytest.exit("mlx_linattn is not installed here; run: pip install -e '.[cpu,test]'", returncode=2)

import helpers
from hypothesis import settings

settings.register_profile("tests", deadline=None, derandomize=True, database=None, max_examples=30)
settings.load_profile("tests")


@pytest.fixture
def fixture_folder(tmp_path):
    """Writes a fixture's checkpoint into a fresh folder and returns it."""
    return lambda name, **kwargs: helpers.materialize(helpers.FIXTURES / name, tmp_path / name, **kwargs)
