"""What the README shows works as written."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def blocks(mark: str, language: str) -> list[str]:
    return re.findall(rf"<!-- {mark} -->\n```{language}\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("code", blocks("test: python", "python"))
def test_python_examples_run(code, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    if "Pepper" in code:
        assert "Your dog's name is Pepper." in done.stdout
    if "4821" in code:
        assert "The code is 4821" in done.stdout


@pytest.mark.parametrize(
    ("mark", "says"), [("convert", "Your dog's name is Pepper.\n"), ("register", "--trust-remote-code")]
)
def test_shell_examples_run(mark, says, tmp_path):
    (code,) = blocks(f"test: {mark}", "sh")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["sh", "-ec", code], capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PATH": path}
    )
    assert done.returncode == 0, done.stderr
    assert says in done.stdout


def test_the_two_commands_are_there():
    (demo,) = blocks("command: demo", "sh")
    (tests,) = blocks("command: tests", "sh")
    assert demo.count("\n") == tests.count("\n") == 1
    assert "pytest" in tests and "mlx-linattn chat" in demo
