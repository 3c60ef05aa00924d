"""Messages of several lines, completion, the nearest command and history."""

import os
import stat

import pytest

from mlx_linattn.chat import commands, file_commands  # noqa: F401 - they register themselves
from mlx_linattn.chat.lines import History, incomplete, joined
from mlx_linattn.chat.registry import REGISTRY, completions, nearest

ISSUE = (
    "help exit clear system set undo redo retry edit continue fork save load read think stats memory model copy export"
)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("hello", "hello"),
        ("one\\\ntwo", "one\ntwo"),
        ('"""\none\n\ntwo\n"""', "one\n\ntwo"),
        ('"""one"""', "one"),
        ('say """ this', 'say """ this'),
    ],
)
def test_lines_are_joined(typed, message):
    assert not incomplete(typed) and joined(typed) == message


@pytest.mark.parametrize("typed", ["one\\", '"""', '"""one\ntwo', '""""'])
def test_a_message_can_go_on(typed):
    assert incomplete(typed)


def test_every_command_is_there_with_help():
    assert {f"/{name}" for name in ISSUE.split()} <= set(REGISTRY)
    assert all(one.help and one.handler for one in REGISTRY.values())
    names = [name for one in REGISTRY.values() for name in (one.name, *one.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("typed", "meant"), [("/hepl", "/help"), ("/sav", "/save"), ("/regn", "/retry"), ("/quti", "/exit"), ("/", "/help")]
)
def test_the_nearest_command(typed, meant):
    assert nearest(typed) == meant


def test_tab_completes_commands_words_sessions_and_paths(tmp_path):
    (tmp_path / "notes.md").touch()
    (tmp_path / "nested").mkdir()
    names = lambda: ["monday", "tuesday"]  # noqa: E731
    assert completions("/re", names) == ["/redo", "/retry", "/read"]
    assert completions("/think s", names) == ["show"]
    assert completions("/load mo", names) == ["monday"]
    assert completions("/set max", names) == ["max_tokens"]
    assert completions(f"/read {tmp_path}/n", names) == [f"{tmp_path}/nested/", f"{tmp_path}/notes.md"]
    assert completions("hello /re", names) == completions("//re", names) == completions("/zz x", names) == []


def test_history_is_private_and_survives_damage(tmp_path):
    history = History(tmp_path / "deep" / "history")
    history.add("one\nline")
    history.add("größe")
    with history.file.open("a") as file:
        file.write("not json\n")
    history.add("last")
    assert history.read() == ["one\nline", "größe", "last"]
    assert stat.S_IMODE(os.stat(history.file).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(history.file.parent).st_mode) == 0o700
