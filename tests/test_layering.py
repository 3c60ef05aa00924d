"""Imports flow one way: config -> arch -> spec -> layers -> ops -> kernels; commands stand on the public interface."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "mlx_linattn"
HOMES = {PACKAGE: PACKAGE, "metal": f"{PACKAGE}.metal", "convert": f"{PACKAGE}.convert", "chat": f"{PACKAGE}.chat"}
PUBLIC = ""  # the package itself: what ``import mlx_linattn`` offers

# What each room may import of ours, besides itself. A room is a module or folder directly below the package.
MAY_IMPORT = {
    "errors": set(),
    "metal": set(),
    "spec": {"errors"},
    "cuts": set(),
    "layout": {"errors"},
    "arch": {"spec", "layout", "errors"},
    "ops": {"metal", "errors"},
    "state": {"ops", "errors"},
    "layers": {"ops", "spec", "cuts", "state", "errors"},
    "model": {"layers", "spec", "state", "errors"},
    "chat": {PUBLIC, "errors", "generate_cli"},
    "weights": {"arch", "layout", "cuts", "model", "spec", "errors"},
    "parallel": {PUBLIC, "layers", "layout", "cuts", "model", "spec", "state", "weights", "errors"},
    "session": {"generation", "budget", "model", "state", "errors"},
    "bench": {
        PUBLIC,
        "arch",
        "budget",
        "cuts",
        "doctor",
        "errors",
        "figures",
        "generate_cli",
        "generation",
        "interop",
        "layout",
        "loading",
        "model",
        "ops",
        "parallel",
        "state",
        "weights",
    },
    "engine": {"session", "generation", "sampling", "loading", "budget", "model", "state", "errors"},
    "server": {PUBLIC, "engine", "generate_cli", "errors"},
    "convert": {PUBLIC, "arch", "layout", "weights", "loading", "model", "layers", "state", "spec", "budget", "errors"},
}
PURE = {"errors", "spec", "cuts", "layout", "arch"}  # data and rules: they run without MLX
HEAVY = {"mlx_lm", "transformers"}  # imported in interop alone


def modules() -> dict[str, Path]:
    """{dotted name: file} of everything that is installed."""
    found = {}
    for folder, prefix in HOMES.items():
        for file in (ROOT / folder).rglob("*.py"):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([prefix, *(part for part in parts if part != "__init__")])] = file
    return found


MODULES = modules()


def imports(name: str) -> set[str]:
    """Dotted names of all that a module imports, inside functions and for type checking too."""
    file = MODULES[name]
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                found.add(whole if whole in MODULES else base)
    return found


def room(dotted: str) -> str | None:
    """Which room of ours a name lies in; None for other people's packages."""
    first, _, rest = dotted.partition(".")
    return rest.partition(".")[0] if first == PACKAGE else None


def test_every_folder_is_read():
    assert {room(name) for name in MODULES} >= {PUBLIC, "arch", "layers", "ops", "metal", "convert", "chat"}
    assert f"{PACKAGE}.spec" in imports(f"{PACKAGE}.arch.qwen3_5")


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_flow_one_way(name):
    here = room(name)
    used = {r for r in map(room, imports(name)) if r is not None and r != here}
    if here in MAY_IMPORT:
        assert used <= MAY_IMPORT[here], f"{name} must not import {sorted(used - MAY_IMPORT[here])}"
    elif here != PUBLIC:  # which re-exports convert()
        assert not used & {"chat", "convert"}, f"{name}: the library does not know its commands"


@pytest.mark.parametrize("name", sorted(name for name in MODULES if room(name) in PURE))
def test_specs_and_layouts_need_no_mlx(name):
    assert not {n for n in imports(name) if n.split(".")[0] == "mlx"}


@pytest.mark.parametrize("name", sorted(name for name in MODULES if room(name) != "interop"))
def test_mlx_lm_and_transformers_enter_by_one_door(name):
    assert not {n for n in imports(name) if n.split(".")[0] in HEAVY}
