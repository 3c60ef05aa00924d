"""Ranks that are processes, over MLX's ring: the same logits as one process, and a quick end where one is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers import FIXTURES, assert_close, endless_demo, materialize

import mlx_linattn as la

sys.path.insert(0, str(Path(__file__).parent))

from processes import results, start_ranks

HERE = Path(__file__).parent
ASK = "What is my dog's name?"
# Between them every mixer, and every sum and norm that goes over all ranks.
MODELS = {
    2: ("bailing_hybrid_v25", "fla_hgrn2", "jamba", "kimi_k3", "minimax_text_01", "olmo_hybrid", "qwen3_next", "recurrent_gemma"),
    4: ("fla_gated_deltanet_hybrid",),
}  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 4])
def test_logits_are_those_of_one_process(tmp_path, ranks):
    folders = [str(materialize(FIXTURES / name, tmp_path / name)) for name in MODELS[ranks]]
    found = results(start_ranks(tmp_path, ranks, lambda _: [str(HERE / "checks.py"), *folders]))
    assert [status for status, _, _ in found] == [0] * ranks, "\n".join(err for _, _, err in found)
    assert found[0][1].split("\n")[:-1] == [f"{name}: same" for name in MODELS[ranks]]


def test_a_conversation_goes_on_whatever_the_number_of_ranks(tmp_path):
    """One process keeps a session, two take it over, one goes on: nothing is read again, and undo reaches back."""
    model, tokenizer = la.load("demo", dtype="float32")
    chat = la.Session(model, tokenizer)
    for text in ("My dog is called Pepper.", "My cat is called Momo."):
        chat.send(text, max_tokens=6)
    one, two = tmp_path / "one.session", tmp_path / "two.session"
    chat.save(one)
    command = [str(HERE / "conversation.py"), str(one), str(two)]
    (status, out, err), (other, _, _) = results(start_ranks(tmp_path, 2, lambda _: command))
    assert (status, other) == (0, 0), err
    chat.undo()
    assert out == f"{chat.send(ASK, max_tokens=12)} {chat.last.reused_tokens}\n"
    assert chat.last.reused_tokens > 0
    again = la.Session.load(two, model, tokenizer)
    assert (again.messages, again.tokens) == (chat.messages, chat.tokens)
    for mine, theirs in zip(chat.state.arrays, again.state.arrays):
        assert_close(
            theirs[:, :, : chat.state.offset], mine[:, :, : chat.state.offset], 1e-3, "the state that two ranks kept"
        )


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


def test_other_weights_on_one_rank_are_noticed_before_the_first_token(tmp_path):
    models = [endless_demo(tmp_path / name) for name in ("one", "other")]
    weights = models[1] / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    data[len(data) // 2 + 1] ^= 1
    weights.write_bytes(data)
    (status, out, err), (other, _, silent) = results(start_ranks(tmp_path, 2, lambda rank: generate(models[rank])))
    assert (status, other, out, silent) == (2, 2, "", "")
    assert err.startswith("mlx-linattn: rank 1 of 2 differs from rank 0 in its weights: "), err


def test_alone_it_says_how_to_start_several(tmp_path):
    ((status, _, err),) = results(start_ranks(tmp_path, 1, lambda _: generate("demo")))
    assert status == 2 and "mlx.launch -n 2 " in err
