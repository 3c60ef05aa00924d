"""Prints a conversation with the demo as it looked in a pseudo-terminal: the transcript in the README.

python tests/chat/record.py
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from terminal import Terminal

LINES = ("My dog is called Pepper.", "What is my dog's name?", "/undo", "What's my dog called?", "/memory")
READY = ">>>"


def record() -> str:
    with (
        tempfile.TemporaryDirectory() as folder,
        Terminal("chat", columns=96, TERM="dumb", MLX_LINATTN_DATA=folder) as chat,
    ):
        chat.expect(READY)
        shown = []
        for line in LINES:
            chat.enter(line)
            chat.expect(line)  # as the terminal repeats what is typed
            shown.append(f"{READY} {line}")
            lines = [one.rstrip() for one in chat.expect(READY).splitlines()]
            shown += [one for one in lines if one and one != line]
        chat.end_of_input()
        chat.wait()
    return "\n".join(shown)


if __name__ == "__main__":
    print(record())
