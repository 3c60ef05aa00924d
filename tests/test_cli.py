"""The command line: help, one-line errors with status 2, and generate as mlx_lm.generate."""

import os
import subprocess
import sys

import pytest

from mlx_linattn.cli import COMMANDS


def run(*arguments, text=None):
    return subprocess.run(
        [sys.executable, "-m", "mlx_linattn", *arguments],
        input=text if text is not None else "",
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "100"},
        timeout=120,
    )


@pytest.mark.parametrize("arguments", [(), ("--help",), ("help",)])
def test_alone_it_shows_what_there_is(arguments):
    done = run(*arguments)
    assert done.returncode == 0
    for name in COMMANDS:
        assert f"  {name} " in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name):
    done = run(name, "--help")
    assert done.returncode == 0 and f"mlx-linattn {name}" in done.stdout


def test_an_unknown_command_names_the_nearest():
    done = run("generat")
    assert done.returncode == 2 and "did you mean 'generate'?" in done.stderr


def test_generate_answers():
    done = run(
        "generate",
        "--model",
        "demo",
        "--prompt",
        "My cat is called Momo. What is my cat's name?",
        "--max-tokens",
        "30",
        "--temp",
        "0",
    )
    assert done.returncode == 0
    assert done.stdout == "Your cat's name is Momo.\n"
    assert "peak memory" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "/no/such/folder"), "no such folder"),
        (("--max-tokens", "0"), "--max-tokens is 0"),
        (("--temp", "-1"), "--temp is -1.0"),
        (("--top-p", "2"), "--top-p is 2.0"),
        (("--chat-template-config", "{"), "not JSON"),
        (("--model", "nobody/nothing"), "nobody/nothing"),
    ],
)
def test_bad_input_ends_in_one_line_and_status_2(arguments, words):
    done = run("generate", "--prompt", "hi", *arguments)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and words in done.stderr
    assert done.stdout == ""


def test_an_empty_prompt_is_refused():
    done = run("generate", text="")
    assert done.returncode == 2 and "empty" in done.stderr


def test_debug_shows_where_an_error_came_from():
    done = run("generate", "--debug", "--prompt", "hi", "--model", "/no/such/folder")
    assert done.returncode == 1 and "Traceback" in done.stderr
