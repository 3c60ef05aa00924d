"""Every command, as a person types it."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from terminal import Terminal

READY = ">>>"
EDITOR = f"""{sys.executable} -c "import pathlib, sys; p = pathlib.Path(sys.argv[1]); p.write_text(p.read_text().replace('dog', 'cat'))" """
PEPPER = "Noted: your dog's name is Pepper."


@pytest.fixture
def chat(tmp_path):
    with Terminal("chat", cwd=tmp_path, MLX_LINATTN_DATA=str(tmp_path / "data"), EDITOR=EDITOR) as chat:
        chat.expect(READY)
        yield chat
        assert "Traceback" not in chat.screen


def say(chat, text: str, *expected: str) -> None:
    chat.enter(text)
    for one in expected:
        chat.expect(one)
    chat.expect(READY)


def test_undo_redo_retry_edit_fork(chat):
    say(chat, "/undo", "cannot undo 1 turns")
    say(chat, "/retry", "nothing to retry")
    say(chat, "/edit", "no question to edit yet")
    say(chat, "/continue", "no answer to continue")
    say(chat, "My dog is called Pepper.", PEPPER, "reused")
    say(chat, "/undo", "Taken back: My dog is called Pepper.")
    say(chat, "What is my dog's name?", "I don't have that.", "reused")
    say(chat, "/redo", "nothing to redo")
    say(chat, "/undo", "Taken back: What is my dog's name?")
    say(chat, "/redo", "Back again: What is my dog's name?")
    say(chat, "/undo x", "wants a number")
    say(chat, "/edit My dog is called Pepper.", PEPPER, "reused")
    say(chat, "/edit", "Noted: your cat's name is Pepper.", "reused")
    say(chat, "/retry", "temp is 0", "Noted: your cat's name is Pepper.")
    say(chat, "/fork other", "Now in other")
    say(chat, "My dog is called Rex.", "Rex.", "reused")
    say(chat, "/load", "other", "4 messages", "(this one)", "2 messages")
    say(chat, "/stats", "this chat", "checkpoints")
    say(chat, "/memory", "now", "262,144", "recurrent state, constant")
    chat.enter("/exit")
    assert chat.wait() == 0


def test_settings(chat):
    say(chat, "/set", "temp 0.0", "max_tokens -1", "seed none", "markdown on", "think as the model's template")
    say(chat, "/set max_tokens 3", "max_tokens is 3 now.")
    say(chat, "/set stats off", "stats is off now.")
    say(chat, "My dog is called Pepper.", "Noted: your")
    say(chat, "/set max_tokens -1", "max_tokens is -1 now.")
    say(chat, "/continue", "name is Pepper.")
    assert "tok/s" not in chat.screen
    say(chat, "/set top_p 2", "top_p is 2, expected a number, between 0 and 1")
    say(chat, "/set tmep 1", "nearest: temp")
    say(chat, "/set temp", "wants a value")
    say(chat, "/set markdown off", "markdown is off now.")
    say(chat, "/set seed 7", "seed is 7 now.")
    say(chat, "/set temp 0.7", "temp is 0.7 now.")
    say(chat, "/retry", ".")
    say(chat, "/system You are terse.", "System prompt: You are terse.")
    say(chat, "/system @nowhere.md", "nowhere.md: cannot be read")
    say(chat, "/system -", "System prompt: (none)")


def test_thoughts_are_folded_shown_and_expanded(chat):
    say(chat, "/think on", "Thinking: on; thoughts are folded.")
    say(chat, "My dog is called Pepper.", "thought for", "tokens)", PEPPER, "reused")
    say(chat, "What is my dog's name?", "Your dog's name is Pepper.", "reused")
    say(chat, "/think show", "My notes say: Pepper", "Thoughts are shown.")
    say(chat, "/retry", "My notes say: Pepper", "thought for", "Your dog's name is Pepper.", "reused")
    say(chat, "/think fold", "folded")
    say(chat, "/think off", "Thinking: off")
    say(chat, "/think loudly", "wants on, off, show or fold")
    say(chat, "What is my dog's name?", "Your dog's name is Pepper.", "reused")


def test_save_load_export_copy_clear(chat, tmp_path):
    say(chat, "/copy", "no answer yet")
    say(chat, "/export", "nothing to export yet")
    say(chat, "My dog is called Pepper.", PEPPER, "reused")
    say(chat, "/export talk.md", "Wrote 2 messages to talk.md")
    say(chat, "/export talk.md", "exists already")
    say(chat, "/export talk.json", "Wrote 2 messages to talk.json")
    say(chat, "/copy", " 33 characters")
    say(chat, "/copy code", "no block of code")
    say(chat, "/save dogs", "Saved as dogs")
    say(chat, "/save ./dogs.session", "Saved to ./dogs.session")
    say(chat, "/clear", "forgotten")
    say(chat, "What is my dog's name?", "I don't have that.", "reused")
    say(chat, "/save dogs", "there is a session 'dogs' already")
    say(chat, "/load dosg", "there is no session 'dosg'")
    say(chat, "/load dogs", "dogs: 2 messages", "tokens of state in", "reading them again would take", "Last: Noted")
    say(chat, "What is my dog's name?", "Your dog's name is Pepper.", "reused")
    say(chat, "/load ./dogs.session", "2 messages")
    say(chat, "What is my dog's name?", "Your dog's name is Pepper.", "reused")
    assert "## You\n\nMy dog is called Pepper.\n\n## demo\n\nNoted" in (tmp_path / "talk.md").read_text()
    assert json.loads((tmp_path / "talk.json").read_text())["messages"][0]["role"] == "user"
    assert (tmp_path / "dogs.session").stat().st_mode & 0o077 == 0


def test_documents(chat, tmp_path):
    (tmp_path / "dog.txt").write_text("My dog is called Pepper.\n")
    (tmp_path / "cat.txt").write_text("Weather is nice.\n")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\xff\xfe")
    say(chat, "/read", "wants one or more files")
    say(chat, "/read nothing.txt", "nothing.txt: no such file")
    say(chat, "/read image.png", "is not text")
    say(chat, "/read data", "is a folder")
    say(chat, "/read d*.txt", "Read dog.txt:", "tokens in")
    say(chat, "What is my dog's name?", "Your dog's name is Pepper.", "reused")
    say(chat, "/undo", "Taken back: What is my dog's name?")
    say(chat, "What is my dog's name?", "Your dog's name is Pepper.", "reused")
    say(chat, "/undo 2", "Taken back: dog.txt")


def test_help_models_and_slashes(chat):
    say(chat, "/help", "/undo [N]", "/export [FILE]", "opens and closes a block")
    say(chat, "/help undo", "/undo [N]: take back")
    say(chat, "/help nothing", "there is no command /nothing")
    say(chat, "/udno", "nearest: /undo", "Nothing was sent")
    say(chat, "/model", "Model: demo")
    say(chat, "/model /no/such/model", "no such folder", "going on with demo")
    say(chat, "My dog is called Pepper.", PEPPER, "reused")
    say(chat, "/model demo", "loaded in")
    say(chat, "What is my dog's name?", "Your dog's name is Pepper.", "(0 reused")
    say(chat, "//help", "reused")
    chat.enter("/bye")
    assert chat.wait() == 0
