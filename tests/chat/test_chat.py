"""The chat as a person uses it, in a pseudo-terminal, and as a script uses it, through pipes."""

import re
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from helpers import endless_demo
from piped import run
from terminal import Terminal

READY = ">>>"


def test_a_conversation(tmp_path):
    with Terminal("chat", HOME=str(tmp_path)) as chat:
        assert "--model mlx-community/Qwen3.5-4B-4bit" in chat.expect(READY).replace("\n", " ")
        chat.enter("My dog is called Pepper.")
        chat.expect("Noted: your dog's name is Pepper.")
        chat.expect("tok/s")
        chat.expect("(constant) + KV")
        chat.expect(READY)
        chat.enter("What is my dog's name?")
        chat.expect("Your dog's name is Pepper.")
        chat.expect("reused")
        chat.expect(READY)
        chat.enter("/hepl")
        chat.expect("nearest: /help")
        chat.expect(READY)
        chat.enter("/clear")
        chat.expect("forgotten")
        chat.expect(READY)
        chat.enter("What is my dog's name?")
        chat.expect("I don't have that.")
        chat.expect(READY)
        chat.end_of_input()
        assert chat.wait() == 0


def test_ctrl_c_stops_the_answer_and_keeps_the_chat(tmp_path):
    model = str(endless_demo(tmp_path / "endless"))
    with Terminal("chat", "--model", model, HOME=str(tmp_path)) as chat:
        chat.expect(READY)
        chat.enter("My dog is called Pepper.")
        time.sleep(3)
        chat.interrupt()
        chat.expect("(stopped)")
        chat.expect("tok/s")
        chat.expect(READY)
        chat.type("half a line")
        chat.interrupt()
        chat.expect("(Ctrl-D or /exit leaves)")
        chat.expect(READY)
        chat.enter("/exit")
        assert chat.wait() == 0
        assert "Traceback" not in chat.screen


def test_lines_can_be_joined(tmp_path):
    with Terminal("chat", HOME=str(tmp_path)) as chat:
        chat.expect(READY)
        chat.enter("My cat is called Momo.\\")
        chat.expect("...")
        chat.enter("What is my cat's name?")
        chat.expect("Your cat's name is Momo.")
        chat.expect(READY)
        chat.enter('"""My dog is called Pepper.')
        chat.expect("...")
        chat.enter('What is my dog\'s name?"""')
        chat.expect("Your dog's name is Pepper.")
        chat.expect(READY)


def test_the_plain_reader_serves_where_prompt_toolkit_is_missing(tmp_path):
    (tmp_path / "prompt_toolkit.py").write_text("raise ImportError")
    with Terminal("chat", HOME=str(tmp_path), PYTHONPATH=str(tmp_path)) as chat:
        chat.expect(READY)
        chat.enter("My dog is called Pepper.")
        chat.expect("Noted: your dog's name is Pepper.")
        chat.expect(READY)
        chat.end_of_input()
        assert chat.wait() == 0


@pytest.mark.parametrize(
    ("environment", "unwanted"),
    [({"NO_COLOR": "1"}, r"\x1b\[[0-9;]*(?<![0-9])(3|4|9|10)[0-7]m"), ({"TERM": "dumb"}, "\x1b")],
)
def test_plain_terminals_get_plain_text(tmp_path, environment, unwanted):
    with Terminal("chat", "--think", columns=40, HOME=str(tmp_path), **environment) as chat:
        chat.expect(READY)
        chat.enter("My dog is called Pepper.")
        chat.expect("thought for")
        chat.expect("Noted: your dog's name is")
        chat.expect(READY)
        chat.enter("/memory")
        chat.expect("constant")
        chat.expect(READY)
        chat.enter("/nonsense")
        chat.expect("nearest")
        chat.expect(READY)
    assert not re.search(unwanted, chat.raw)


class TestScripts:
    def test_the_answer_alone_is_on_stdout(self, tmp_path):
        done = run("chat", "-p", "My cat is called Momo. What is my cat's name?", cwd=tmp_path)
        assert done.returncode == 0
        assert done.stdout == "Your cat's name is Momo.\n"
        assert "tok/s" in done.stderr

    def test_the_question_can_be_piped_in(self):
        done = run("chat", text="My cat is called Momo. What is my cat's name?\n")
        assert done.stdout == "Your cat's name is Momo.\n"

    def test_reasoning_stays_off_stdout(self):
        done = run("chat", "--think", "-p", "My cat is called Momo. What is my cat's name?")
        assert done.stdout == "Your cat's name is Momo.\n"
        assert "thought for" in done.stderr

    def test_a_folder_without_tokenizer_is_refused(self, fixture_folder):
        done = run("chat", "--model", str(fixture_folder("qwen3_5_untied_text")), "-p", "hi")
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1 and "has no tokenizer" in done.stderr

    def test_an_empty_message_is_refused(self):
        assert run("chat", text="\n").returncode == 2
