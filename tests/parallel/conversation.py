"""What each rank of a test runs: a conversation that is kept in a file and taken back, and read by a process alone too."""

from __future__ import annotations

import sys
from pathlib import Path

import mlx_linattn as la
from mlx_linattn import parallel

NAME, AGE = "My dog is called Pepper.", "My cat is called Momo."
ASK = "What is my dog's name?"


def main(folder: Path, ranks: int) -> None:
    group = parallel.start("tensor") if ranks > 1 else None
    model, tokenizer = la.load("demo", dtype="float32", group=group)
    chat = la.Session(model, tokenizer)
    print(chat.send(NAME, max_tokens=20))
    print(chat.send(ASK, max_tokens=20))
    chat.undo()
    print(chat.send(AGE, max_tokens=20))
    chat.save(folder / f"of-{ranks}.session")
    for file in sorted(folder.glob("of-*.session")):
        again = la.Session.load(file, model, tokenizer)
        print(again.send(ASK, max_tokens=20), again.last.reused_tokens)
        again.undo(2)
        print(again.send(ASK, max_tokens=20), again.last.reused_tokens)


main(Path(sys.argv[1]), int(sys.argv[2]))
