"""Keys and signals: interrupts, pastes, completion, history, a terminal that closes, a program that is killed."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from helpers import endless_demo
from terminal import Terminal

READY = ">>>"
PEPPER = "Noted: your dog's name is Pepper."


def start(tmp_path, *arguments, columns=100, **environment) -> Terminal:
    data = str(tmp_path / "data")
    return Terminal("chat", *arguments, columns=columns, cwd=tmp_path, MLX_LINATTN_DATA=data, **environment)


def kept(tmp_path, name="*") -> list[dict]:
    (file,) = (tmp_path / "data" / "sessions").glob(f"{name}/messages.json")
    return json.loads(file.read_text())["messages"]


def stop(chat) -> None:
    """Press Ctrl-C, as often as a person would, until it was heard: by the answer or by the prompt."""
    for _ in range(12):
        if chat.appears("(stopped)", timeout=5) or chat.appears("leaves)", timeout=1):
            chat.expect(READY)
            return
        chat.interrupt()
    raise AssertionError(f"Ctrl-C was not heard; the screen ends with:\n{chat.screen[-1500:]}")


def test_alt_enter_paste_and_quotes_make_one_message(tmp_path):
    with start(tmp_path) as chat:
        chat.expect(READY)
        chat.type("My dog is called Pepper.\x1b\r")
        chat.expect("...")
        chat.enter("What is my dog's name?")
        chat.expect("Your dog's name is Pepper.")
        chat.expect(READY)
        chat.paste("My cat is called Momo.\nWhat is my cat's name?")
        chat.expect("What is my cat's name?")
        chat.enter("")
        chat.expect("Your cat's name is Momo.")
        chat.expect(READY)
    assert [one["content"] for one in kept(tmp_path) if one["role"] == "user"] == [
        "My dog is called Pepper.\nWhat is my dog's name?",
        "My cat is called Momo.\nWhat is my cat's name?",
    ]


def test_a_paste_of_5000_lines_is_one_message_and_its_reading_can_be_stopped(tmp_path):
    with start(tmp_path) as chat:
        chat.expect(READY)
        chat.paste("\n".join(f"line {i} of the text" for i in range(5000)))
        chat.expect("line 4999 of the text", timeout=120)
        chat.enter("")
        chat.expect("reading", timeout=120)
        chat.interrupt()
        chat.expect("(stopped", timeout=120)
        chat.expect(READY, timeout=60)
        chat.enter("My dog is called Pepper.")
        chat.expect(PEPPER)
        chat.expect(READY)
        chat.end_of_input()
        assert chat.wait() == 0
    assert len(kept(tmp_path)) == 2


@pytest.mark.parametrize("plain", [False, True])
def test_tab_and_history(tmp_path, plain):
    environment = {}
    if plain:
        (tmp_path / "prompt_toolkit.py").write_text("raise ImportError")
        environment["PYTHONPATH"] = str(tmp_path)
    (tmp_path / "facts.txt").write_text("My dog is called Pepper.")
    with start(tmp_path, **environment) as chat:
        chat.expect(READY)
        chat.type("/rea\t")
        chat.expect("/read")
        chat.type(" ")
        chat.type("fac\t")
        chat.expect("facts.txt")
        chat.enter("")
        chat.expect("Read facts.txt")
        chat.expect(READY)
        chat.end_of_input()
        assert chat.wait() == 0
    with start(tmp_path, **environment) as chat:
        chat.expect(READY)
        chat.type("\x1b[A")
        chat.expect("/read facts.txt")
        chat.enter("")
        chat.expect("Read facts.txt")
        chat.expect(READY)
    assert (tmp_path / "data" / "history").stat().st_mode & 0o077 == 0


def test_what_is_pasted_into_an_answer_is_not_sent(tmp_path):
    with start(tmp_path, "--model", str(endless_demo(tmp_path / "endless"))) as chat:
        chat.expect(READY)
        chat.enter("My dog is called Pepper.")
        time.sleep(1)
        chat.type("one\ntwo\nthree\n")
        stop(chat)
        chat.enter("/exit")
        chat.wait()
    assert len(kept(tmp_path)) == 2


def test_interrupts_at_any_moment_end_in_a_prompt_and_never_in_a_traceback(tmp_path):
    with start(tmp_path, "--model", str(endless_demo(tmp_path / "endless")), "--think") as chat:
        chat.expect(READY)
        for i in range(10):
            chat.enter("My dog is called Pepper.")
            time.sleep(0.07 * i * i)
            chat.interrupt()
            if i % 3 == 2:  # twice in a row
                chat.interrupt()
            stop(chat)
        chat.enter("/exit")
        assert chat.wait() == 0
        assert "Traceback" not in chat.screen


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("how", ["SIGTERM", "SIGHUP", "closed"])
def test_whoever_ends_the_program_the_conversation_is_kept(tmp_path, how, busy):
    with start(tmp_path, "--session", "dogs") as chat:
        chat.expect(READY)
        chat.enter("My dog is called Pepper.")
        chat.expect(PEPPER)
        chat.expect(READY)
        if busy:
            chat.enter("/set temp 9")
            chat.expect("now.")
            chat.expect(READY)
            chat.enter("Tell me something.")
            time.sleep(2)
        if how == "closed":
            chat.hang_up()
            code = chat.process.wait(60)
        else:
            os.kill(chat.process.pid, getattr(signal, how))
            code = chat.wait(60)
        assert code in {"SIGTERM": [143], "SIGHUP": [129], "closed": [129, 0]}[how]
        assert "Traceback" not in chat.screen
    assert len(kept(tmp_path, "dogs")) == (4 if busy else 2)
    assert (tmp_path / "data" / "sessions" / "dogs" / "state.safetensors").exists()


def test_the_plain_reader_leaves_in_order_too(tmp_path):
    (tmp_path / "prompt_toolkit.py").write_text("raise ImportError")
    with start(tmp_path, PYTHONPATH=str(tmp_path)) as chat:
        chat.expect(READY)
        chat.enter("My dog is called Pepper.")
        chat.expect(PEPPER)
        chat.expect(READY)
        time.sleep(1)  # readline looks for signals only once it waits, a moment after it has shown its prompt
        os.kill(chat.process.pid, signal.SIGTERM)
        assert chat.wait(60) == 143
        assert "Traceback" not in chat.screen
    assert len(kept(tmp_path)) == 2


def test_a_killed_chat_goes_on_with_its_messages(tmp_path):
    with start(tmp_path, "--session", "dogs") as chat:
        chat.expect(READY)
        chat.enter("My dog is called Pepper.")
        chat.expect(PEPPER)
        chat.expect(READY)
        chat.process.kill()
        chat.process.wait()
    with start(tmp_path, "--continue") as chat:
        chat.expect("dogs: 2 messages")
        chat.expect(READY)
        chat.enter("What is my dog's name?")
        chat.expect("Your dog's name is Pepper.")
        chat.expect(READY)


def test_resizing_and_wide_characters(tmp_path):
    with start(tmp_path, columns=80) as chat:
        chat.expect(READY)
        chat.enter("Ich mag 日本語 und 👩‍👩‍👧.")
        chat.expect("reused")
        chat.expect(READY)
        chat.resize(40)
        chat.enter("My dog is called Pepper.")
        chat.expect(PEPPER)
        chat.expect("(constant)")
        chat.expect(READY)
    assert kept(tmp_path)[0]["content"] == "Ich mag 日本語 und 👩‍👩‍👧."
