"""Streaming Markdown: however the text is cut, the screen ends as if it had come at once, and blocks stay as committed."""

import sys
from pathlib import Path

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))
from screen import Screen

from mlx_linattn.chat.markdown import MarkdownStream, RawStream
from mlx_linattn.chat.tail import harmless

ANSWER = """# Pepper

A dog, **brave** and *small*, whose tale is long enough to be wrapped in a terminal of forty columns.

1. first

   still the first
2. second

```python
def bark(times):
    return "wuff " * times  # 日本語のコメント and a line that is longer than forty columns

```
- 日本語の長い文章がここにあります。とても長いので折り返されます。
- 👩‍👩‍👧 family, 🇩🇪 flag

| a | b |
|---|---|
| 1 | 2 |

The end"""


def show(text: str, size: int, columns: int = 40, rows: int = 1000) -> Screen:
    screen = Screen(columns, rows)
    console = Console(file=screen, force_terminal=True, width=columns, height=rows, highlight=False)
    stream = MarkdownStream(console, interval=0)
    for start in range(0, len(text), size):
        stream.feed(text[start : start + size])
    stream.end()
    return screen


@pytest.mark.parametrize("size", [1, 2, 7, 64])
@pytest.mark.parametrize("columns", [40, 80])
def test_the_screen_does_not_depend_on_how_the_text_was_cut(size, columns):
    assert show(ANSWER, size, columns).text == show(ANSWER, len(ANSWER), columns).text


def test_a_tail_that_is_taller_than_the_screen_is_shown_whole_in_the_end():
    text = " ".join(f"word{i}" for i in range(200))
    screen = show(text, 5, columns=40, rows=8)
    assert screen.text.split() == text.split()


def test_marks_are_rendered_and_code_is_left_alone():
    text = show(ANSWER, 3, columns=100).text
    assert "brave and small" in text and "**" not in text
    assert '\n    return "wuff " * times' in text and "```" not in text
    assert "# Pepper" in text


def test_a_list_item_goes_on_behind_an_empty_line():
    assert show("1. first\n\n   still\n2. second\n\nno item", 3).text == " 1 first\n   still\n 2 second\n\nno item"


def test_nothing_that_a_model_wrote_is_lost():
    assert show("roses\nviolets <b> std::vector<int>\n\n<div>\nx\n</div>", 4).text == (
        "roses\nviolets <b> std::vector<int>\n\n<div>\nx\n</div>"
    )


def test_code_appears_line_by_line():
    screen = Screen(40)
    stream = MarkdownStream(Console(file=screen, force_terminal=True, width=40), interval=0)
    stream.feed("```\none\ntwo\nthr")
    assert screen.text == "one\ntwo\nthr"
    stream.feed("ee\n```\n")
    stream.end()
    assert screen.text == "one\ntwo\nthree"


def test_a_fence_closes_only_with_its_own_kind():
    assert show("````\n```\ninside\n```\n````\nafter *it*", 1).text == "```\ninside\n```\n\nafter it"


def test_committed_blocks_are_never_written_again():
    written = []
    screen = Screen(40)
    console = Console(file=screen, force_terminal=True, width=40)
    stream = MarkdownStream(console, interval=0)
    stream.feed("first block\n\n")
    stream.feed("second")
    screen.write, write = lambda text: (written.append(text), write(text)), screen.write
    stream.feed(" block\n\nthird\n")
    stream.end()
    assert screen.text == "first block\n\nsecond block\n\nthird"
    assert "first" not in "".join(written)


def test_a_model_cannot_steer_the_terminal():
    assert harmless("a\x1b[2Jb\x9b1Ac\x07\td\n") == "a[2Jb1Ac\td\n"
    assert "\x1b" not in show("x\x1b]0;title\x07y", 1).text


def test_raw_text_is_exact_in_a_pipe():
    screen = Screen(40)
    pieces = []
    screen.write = pieces.append
    stream = RawStream(Console(file=screen), exact=True)
    for piece in ("*a*", "\x1b", "é\n"):
        stream.feed(piece)
    stream.end()
    assert "".join(pieces) == "*a*\x1bé\n\n"
