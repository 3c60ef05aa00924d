"""Options of the command: one JSON object, kept conversations, documents, memory, exit codes."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from piped import run


def chat(tmp_path, *arguments, **more):
    return run("chat", *arguments, cwd=tmp_path, MLX_LINATTN_DATA=str(tmp_path / "data"), **more)


def test_one_json_object(tmp_path):
    done = chat(tmp_path, "--json", "--think", "-p", "My dog is called Pepper. What is my dog's name?")
    assert done.returncode == 0 and done.stderr == ""
    found = json.loads(done.stdout)
    assert found["answer"] == "Your dog's name is Pepper." and "Pepper" in found["reasoning"]
    assert found["finish_reason"] == "stop" and found["model"] == "demo" and found["session"] is None
    assert found["prompt_tokens"] == found["reused_tokens"] + found["prefilled_tokens"] > 0
    assert found["state_bytes"] > 0 and found["kv_bytes"] > 0
    assert not (tmp_path / "data").exists(), "one answer for a script is not kept"


def test_scripts_can_go_on_with_a_conversation(tmp_path):
    first = chat(tmp_path, "--session", "dogs", "-p", "My dog is called Pepper.")
    assert first.stdout == "Noted: your dog's name is Pepper.\n"
    second = chat(tmp_path, "--continue", "--json", "-p", "What is my dog's name?")
    found = json.loads(second.stdout)
    assert found["answer"] == "Your dog's name is Pepper." and found["session"] == "dogs"
    assert found["reused_tokens"] > 0, "the state was loaded, nothing was read again"
    listed = chat(tmp_path, "--list-sessions")
    assert listed.returncode == 0 and "dogs" in listed.stdout and "4 messages" in listed.stdout


def test_documents_come_from_files_and_from_a_pipe(tmp_path):
    (tmp_path / "facts.txt").write_text("My dog is called Pepper.")
    done = chat(tmp_path, "--read", "facts.txt", "-p", "What is my dog's name?")
    assert done.stdout == "Your dog's name is Pepper.\n" and "Read facts.txt" in done.stderr
    done = chat(tmp_path, "--read", "-", "-p", "What is my cat's name?", text="My cat is called Momo.\n")
    assert done.stdout == "Your cat's name is Momo.\n"


def test_a_bounded_cache_stays_bounded_while_a_document_is_read(tmp_path):
    (tmp_path / "long.txt").write_text("The sky is blue today. " * 60)
    sizes = []
    for more in ([], ["--max-kv-size", "64"]):
        done = chat(
            tmp_path, "--json", "--read", "long.txt", "-p", "Hello.", "-m", "2", "--prefill-step-size", "32", *more
        )
        sizes.append(json.loads(done.stdout)["kv_bytes"])
    assert sizes[1] < sizes[0] / 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--continue", "-p", "x"), "no conversation to continue yet"),
        (("--no-save", "--session", "x", "-p", "x"), "--no-save keeps nothing"),
        (("--session", "../x", "-p", "x"), "cannot name a session"),
        (("--temp", "-1", "-p", "x"), "--temp is -1.0"),
        (("--max-tokens", "0", "-p", "x"), "--max-tokens is 0"),
        (("--read", "nowhere", "-p", "x"), "nowhere: cannot be read"),
        (("--memory-limit", "0.001", "-p", "x"), "A smaller one: mlx-linattn chat --model"),
    ],
)
def test_what_cannot_be_done_ends_in_one_line_and_status_2(tmp_path, arguments, words):
    done = chat(tmp_path, *arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert words in done.stderr and done.stderr.count("\n") == 1


def test_json_wants_a_question(tmp_path):
    done = chat(tmp_path, "--json", text="  \n")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
