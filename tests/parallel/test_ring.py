"""Ranks that are processes, over MLX's ring: the same logits as one process, and a quick end where one is missing."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path

import httpx
from helpers import FIXTURES, assert_close, endless_demo, materialize
from tiny_shapes import TINY

import mlx_linattn as la
from mlx_linattn import budget
from mlx_linattn.bench.random_weights import random_model

sys.path.insert(0, str(Path(__file__).parent))

from processes import results, start_ranks

HERE = Path(__file__).parent
ASK = "What is my dog's name?"
# Every sum and norm that goes over all ranks (test_plan.py has all other layers); then streams of one and of several arrays.
TENSOR = ("fla_hgrn2", "jamba", "kimi_k3", "minimax_text_01", "olmo_hybrid")
PIPELINE = ("kimi_k3", "jamba")


def run(tmp_path: Path, ranks: int, *jobs: list[str]) -> list[str]:
    """What the first rank says of some jobs."""
    found = results(start_ranks(tmp_path, ranks, lambda _: [str(HERE / "checks.py"), json.dumps(jobs)]))
    assert [status for status, _, _ in found] == [0] * ranks, "\n".join(err for _, _, err in found)
    return found[0][1].splitlines()


def copy_of_demo(folder: Path, flipped: int) -> None:
    """The demo, with two bits of its weights flipped."""
    shutil.copytree(resources.files("mlx_linattn") / "data" / "demo", folder)
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= flipped
    data[len(data) // 2 + 1] ^= flipped
    weights.write_bytes(data)


def test_two_ranks_do_what_one_process_does(tmp_path, monkeypatch):
    """Where weights differ it is noticed. The same logits. One process keeps a session, two ranks take it over in the one way and then in the other, one process goes on:
    nothing is read again, and undo reaches back. And a chat for a script."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    for rank in range(2):
        copy_of_demo(tmp_path / f"rank{rank}", flipped=rank)
    folders = {name: str(materialize(FIXTURES / name, tmp_path / name)) for name in TENSOR}
    model, tokenizer = la.load("demo", dtype="float32")
    chat = la.Session(model, tokenizer)
    for text in ("My dog is called Pepper.", "My cat is called Momo."):
        chat.send(text, max_tokens=6)
    one, two, three = (str(tmp_path / f"{name}.session") for name in ("one", "two", "three"))
    chat.save(one)
    said = run(
        tmp_path, 2,
        ["tensor", "refused", str(tmp_path / "rank")],
        *(["tensor", "logits", folders[name]] for name in TENSOR),
        *(["pipeline", "logits", folders[name]] for name in PIPELINE),
        ["pipeline", "ahead", folders["jamba"]],
        ["tensor", "conversation", one, two],
        ["pipeline", "conversation", two, three],
        ["pipeline", "chat", "-p", f"My dog is called Pepper. {ASK}"],
    )  # fmt: skip
    assert said.pop(0).startswith("rank 1 of 2 differs from rank 0 in its weights: ")
    checked = len(TENSOR) + len(PIPELINE)
    assert said[:checked] == ["same"] * checked
    assert said.pop(checked) == "ahead"
    expected = []
    for _ in range(2):
        chat.undo()
        expected.append(f"{chat.send(ASK, max_tokens=4)} {chat.last.reused_tokens}")
        assert chat.last.reused_tokens > 0
    assert said[checked:] == [*expected, "Your dog's name is Pepper.", "status 0"]
    again = la.Session.load(three, model, tokenizer)
    assert (again.messages, again.tokens) == (chat.messages, chat.tokens)
    for mine, theirs in zip(chat.state.arrays, again.state.arrays):
        used = slice(chat.state.offset)
        assert_close(theirs[:, :, used], mine[:, :, used], 1e-3, "the state that two ranks kept")


def test_four_ranks_have_the_logits_of_one_process(tmp_path):
    kinds = {"tensor": "fla_gated_deltanet_hybrid", "pipeline": "kimi_k3"}
    jobs = [[kind, "logits", str(materialize(FIXTURES / name, tmp_path / name))] for kind, name in kinds.items()]
    assert run(tmp_path, 4, *jobs) == ["same"] * 2


def test_a_server_on_two_ranks_answers_and_ends_them_all(tmp_path):
    command = ["-m", "mlx_linattn", "serve", "--parallel", "pipeline", "--model", "demo", "--port", "0"]
    processes = start_ranks(tmp_path, 2, lambda _: command)
    try:
        assert processes[0].stderr.readline() == "no prefixes are kept: each rank has a part of the states\n"
        url = re.search(r"http://\S+", processes[0].stderr.readline())[0]
        question = {"model": "demo", "messages": [{"role": "user", "content": f"My dog is called Pepper. {ASK}"}]}
        with ThreadPoolExecutor() as pool:  # several at a time: their rows join one state
            answers = [pool.submit(httpx.post, f"{url}/chat/completions", json=question, timeout=60) for _ in range(3)]
        for answer in answers:
            assert answer.result().json()["choices"][0]["message"]["content"] == "Your dog's name is Pepper."
        processes[0].terminate()
        assert [status for status, _, _ in results(processes, within=30)] == [128 + signal.SIGTERM, 0]
    finally:
        for process in processes:
            process.kill()


def bench(folder: Path, *words: str) -> list[tuple[int, str, str]]:
    common = ("--contexts", "64,512", "--read-limit", "64", "--modes", "exact", "--tokens", "4", "--json")
    return results(start_ranks(folder, 2, lambda _: [str(HERE / "bench.py"), *common, *words]))


def test_two_ranks_are_measured_like_one(tmp_path):
    """The first rank has half of the state and of the heads' keys and values; what is not read is filled on both."""
    (status, out, err), follower = bench(tmp_path, "--shape", "tiny", "--parallel", "tensor")
    assert status == 0 and follower == (0, "", ""), err
    report = json.loads(out)
    assert report["settings"]["parallel"] == "tensor, 2 ranks" and 0 < report["parity"]["exact"] < 5e-2
    read, filled = report["rows"]
    assert (read["read"], read["kind"], filled["read"], filled["kind"]) == (64, "measured", 0, "filled")
    whole = random_model(TINY["mixture"], 4)
    assert read["state_bytes"] == budget.fixed_nbytes(whole, whole.make_cache()) / 2
    assert filled["kv_bytes"] > read["kv_bytes"] > 0


def test_a_rank_whose_kernels_are_wrong_ends_a_bench(tmp_path, monkeypatch):
    monkeypatch.setenv("TEST_WRONG_RANK", "1")
    (status, out, err), (other, *_) = bench(tmp_path, "demo", "--parallel", "pipeline")
    assert (status, out, other) == (2, "", 2)
    assert re.fullmatch(r"mlx-linattn: rank 1 of 2: layer \d+ \(\w+\) differs from its reference .*\n", err), err


def generate(model, *options) -> list[str]:
    arguments = ("--parallel", "tensor", "--ignore-chat-template", "--prompt", "My dog is called", *options)
    return ["-u", "-m", "mlx_linattn", "generate", "--model", str(model), *arguments]


def test_a_killed_rank_ends_the_others_with_one_line(tmp_path):
    model = endless_demo(tmp_path / "demo")
    processes = start_ranks(tmp_path, 2, lambda _: generate(model, "--max-tokens", "-1"))
    try:
        assert processes[0].stdout.read(20)
        processes[1].kill()
        _, (status, _, err) = results(processes[::-1], within=30)
    finally:
        for process in processes:
            process.kill()
    lines = [line for line in err.splitlines() if not line.startswith("[ring]")]
    assert status == 2 and len(lines) == 1, err
    assert lines[0].startswith("mlx-linattn: rank 0 of 2 lost its connection to rank 1: ")


def test_a_rank_that_never_joins_is_named(tmp_path):
    program = "from mlx_linattn import parallel; parallel.start('tensor', patience=1)"
    ((status, _, err),) = results(start_ranks(tmp_path, 2, lambda _: ["-c", program], only=[0]), within=30)
    assert status != 0
    assert err == "mlx-linattn: rank 0 of 2: rank 1 did not join within 1 seconds: was it started?\n"


def test_alone_it_says_how_to_start_several(tmp_path):
    ((status, _, err),) = results(start_ranks(tmp_path, 1, lambda _: generate("demo")))
    assert status == 2 and "mlx.launch -n 2 " in err
