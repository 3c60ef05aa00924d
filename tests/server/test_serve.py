"""The command ``mlx-linattn serve`` as a user starts and stops it."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest
from helpers import endless_demo

from mlx_linattn.cli import main

SERVE = [sys.executable, "-m", "mlx_linattn", "serve"]
PEPPER = [{"role": "user", "content": "My dog is called Pepper. What is my dog's name?"}]


class Served:
    """A server of its own process."""

    def __init__(self, *options, **variables):
        self.process = subprocess.Popen(
            [*SERVE, "--port", "0", *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **variables},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
        )  # fmt: skip
        self.said = self.process.stderr.readline()
        assert self.said, self.process.wait()
        self.url = re.search(r"http://\S+/v1", self.said).group()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    def stop(self, number) -> tuple[int, str, str]:
        """Exit status, and what was printed after the first line."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=20)
        return self.process.returncode, out, err


def test_it_says_where_it_is_and_ctrl_c_ends_it():
    with Served("--served-name", "pepper", "--log-requests", MLX_LINATTN_API_KEY="key") as served:
        assert served.said == f"Serving pepper at {served.url} (Ctrl-C stops)\n"
        assert served.url.startswith("http://127.0.0.1:")
        assert httpx.get(f"{served.url}/models").status_code == 401
        with httpx.Client(headers={"Authorization": "Bearer key"}, timeout=60) as client:
            (model,) = client.get(f"{served.url}/models").json()["data"]
            assert model["id"] == "pepper"
            for name in ("pepper", "demo"):  # its id, and the model as it was asked for
                answer = client.post(f"{served.url}/chat/completions", json={"model": name, "messages": PEPPER})
                assert answer.json()["choices"][0]["message"]["content"] == "Your dog's name is Pepper."
        status, out, err = served.stop(signal.SIGINT)
        assert (status, out) == (130, "")
        lines = err.strip().splitlines()
        assert [re.search(r'"(\w+ \S+) .*" (\d+)', line).groups() for line in lines] == [
            ("GET /v1/models", "401"), ("GET /v1/models", "200"), *[("POST /v1/chat/completions", "200")] * 2,
        ]  # fmt: skip


def test_a_running_answer_is_told_of_the_end_and_does_not_hold_it_up(tmp_path):
    folder = endless_demo(tmp_path / "endless")
    with Served("--model", str(folder), "--shutdown-timeout", "0.2", "--max-tokens", "-1") as served:
        assert "Serving endless at" in served.said
        body = {"messages": PEPPER, "stream": True}
        with httpx.stream("POST", f"{served.url}/chat/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(line for line in lines if '"content": "Your"' in line)
            began = time.monotonic()
            served.process.send_signal(signal.SIGTERM)
            last = [line for line in lines if line][-1]
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "service_unavailable"
        assert served.process.wait(timeout=20) == -signal.SIGTERM
        assert time.monotonic() - began < 15


def failed(capsys, *options) -> str:
    """The one line of a start that cannot be."""
    assert main(["serve", *options]) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert out == ""
    return line


def test_what_cannot_start_says_why_in_one_line(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"cannot listen on 127.0.0.1 port {port}" in failed(capsys, "--port", port)
    assert "cannot listen on 127.0.0.1 port 70000" in failed(capsys, "--port", "70000")
    assert "--max-rows is 0, expected 1 or more" in failed(capsys, "--max-rows", "0")
    assert "every web page" in failed(capsys, "--cors-origin", "*")


def test_a_model_that_is_not_there_ends_the_process_in_order():
    done = subprocess.run([*SERVE, "--port", "0", "--model", "./nothing"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "no such folder" in line


@pytest.mark.parametrize("name", ["uvicorn", "starlette.applications"])
def test_without_the_extra_it_says_what_to_install(name, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    assert "pip install 'mlx-linattn[server]'" in failed(capsys)
