"""What each of two ranks of a test runs: it goes on with a conversation that one process kept, takes a turn back, and keeps it."""

from __future__ import annotations

import sys

import mlx_linattn as la
from mlx_linattn import parallel

ASK = "What is my dog's name?"


def main(taken: str, kept: str) -> None:
    model, tokenizer = la.load("demo", dtype="float32", group=parallel.start("tensor"))
    chat = la.Session.load(taken, model, tokenizer)
    chat.undo()
    print(chat.send(ASK, max_tokens=12), chat.last.reused_tokens)
    chat.save(kept)


main(*sys.argv[1:])
