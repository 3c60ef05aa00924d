"""What is built and installed: everything that is needed, and no generic name in site-packages."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
HOMES = {"mlx_linattn": "mlx_linattn", **{name: f"mlx_linattn.{name}" for name in ("metal", "convert", "chat")}}
MAC = {"platform_system": "Darwin", "sys_platform": "darwin", "platform_machine": "arm64", "os_name": "posix"}
LINUX = {"platform_system": "Linux", "sys_platform": "linux", "platform_machine": "x86_64", "os_name": "posix"}


def installed_path(file: Path) -> str:
    """Where a file of the repository lies in site-packages."""
    home, *rest = file.relative_to(ROOT).parts
    return "/".join([*HOMES[home].split("."), *rest])


def files_that_matter() -> set[str]:
    """Everything that lies in the folders: code, kernel sources, the demo, py.typed."""
    files = {f for home in HOMES for f in (ROOT / home).rglob("*") if f.is_file()}
    return {installed_path(f) for f in files if "__pycache__" not in f.parts and f.name != ".DS_Store"}


def build(source: Path, kind: str, into: Path) -> Path:
    """A wheel or sdist of ``source``, as pip would have setuptools make it, without network."""
    program = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(into)!r}))"
    run = subprocess.run([sys.executable, "-c", program], cwd=source, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return into / run.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of what is built from, so that building leaves nothing in the repository."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for home in HOMES:
        shutil.copytree(ROOT / home, copy / home, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    with zipfile.ZipFile(build(source, "wheel", tmp_path_factory.mktemp("wheel"))) as archive:
        yield archive


def test_every_folder_with_code_is_a_listed_package():
    folders = {
        file.parent for home in HOMES for kind in ("py", "metal", "cu") for file in (ROOT / home).rglob(f"*.{kind}")
    }
    named = {installed_path(folder).replace("/", ".") for folder in folders}
    assert named == set(PROJECT["tool"]["setuptools"]["packages"])
    assert all((folder / "__init__.py").exists() for folder in folders), "editable installs miss folders without one"


def test_wheel_holds_everything(wheel):
    wanted = files_that_matter()
    assert {
        "mlx_linattn/py.typed",
        "mlx_linattn/data/demo/model.safetensors",
        "mlx_linattn/metal/__init__.py",
    } <= wanted
    assert not wanted - set(wheel.namelist())


def test_wheel_puts_only_our_name_into_site_packages(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    version = PROJECT["project"]["version"]
    assert tops == {"mlx_linattn", f"mlx_linattn-{version}.dist-info"}


def test_wheel_has_the_command_and_the_licence(wheel):
    info = f"mlx_linattn-{PROJECT['project']['version']}.dist-info"
    assert "mlx-linattn = mlx_linattn.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()
    assert f"{info}/licenses/LICENSE" in wheel.namelist()


def test_sdist_builds_the_same_wheel(source, wheel, tmp_path):
    with tarfile.open(build(source, "sdist", tmp_path)) as archive:
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (unpacked,) = (path for path in tmp_path.iterdir() if path.is_dir())
    with zipfile.ZipFile(build(unpacked, "wheel", tmp_path)) as again:
        assert set(again.namelist()) == set(wheel.namelist())


def needed(environment: dict[str, str], extra: str) -> set[str]:
    """What mlx pulls in on a machine for one of its extras."""
    wanted = [Requirement(line) for line in requires("mlx") or ()]
    return {r.name for r in wanted if r.marker is None or r.marker.evaluate({**environment, "extra": extra})}


def test_cpu_extra_is_for_linux_and_changes_nothing_on_a_mac():
    assert PROJECT["project"]["optional-dependencies"]["cpu"] == ["mlx[cpu]"]
    assert needed(MAC, "cpu") == needed(MAC, "") == {"mlx-metal"}
    assert needed(LINUX, "cpu") == {"mlx-cpu"}
