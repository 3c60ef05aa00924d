"""What each rank of a test runs: jobs, one after the other. The first rank prints what comes of them; the others follow.

A job: [kind, "refused", folder of each rank without its number], [kind, "logits", folder], [kind, "ahead", folder], [kind, "conversation", file to go on from,
file to keep], or at the end [kind, "chat", words ...].
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import mlx.core as mx
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers import assert_close, golden, tolerance

import mlx_linattn as la
from mlx_linattn import cli, parallel
from mlx_linattn.errors import ParallelError
from mlx_linattn.parallel import follower

ASK = "What is my dog's name?"


def refused(group: parallel.Group, folder: str) -> str:
    """Why a model is not loaded; the first rank alone says so."""
    try:
        la.load_model(f"{folder}{group.rank}", group=group)
    except ParallelError as error:
        return str(error)
    except SystemExit as left:
        assert left.code == 2
        sys.exit(0)
    raise AssertionError("it was loaded")


def logits(group: parallel.Group, folder: str) -> str:
    name = Path(folder).name
    want, within = golden(name), tolerance(name)
    model, _ = la.load_model(folder, group=group, dtype="float32")
    cache = model.make_cache()
    assert_close(model(want["input_ids"], cache), want["logits_prefill"], within, "prefill")
    before = cache.snapshot()
    steps = [model(want["decode_ids"][:, i : i + 1], cache) for i in range(3)]
    assert_close(mx.concatenate(steps, axis=1), want["logits_decode"][:, :3], within, "decode")
    twin = cache.fork()
    cache.restore(before)
    again = [model(want["decode_ids"][:, i : i + 1], cache) for i in range(2)]
    assert_close(mx.concatenate(again, axis=1), want["logits_decode"][:, :2], within, "decode after undo")
    turns = {3: twin.fork(), 2: cache.fork()}  # then nothing comes between the two tokens
    for i, step in [(i, model(want["decode_ids"][:, i : i + 1], state)) for i, state in turns.items()]:
        assert_close(step[:, 0], want["logits_decode"][:, i], within, "decode of two states by turns")
    rows = twin.take([0]).join(cache.take([0]))  # of different lengths, on their way together
    step = model(np.concatenate([want["decode_ids"][:1, i : i + 1] for i in (3, 2)]), rows)
    assert_close(step[0], want["logits_decode"][0, 3:4], within, "decode of a fork")
    assert_close(step[1], want["logits_decode"][0, 2:3], within, "decode of a row that joined")
    assert rows.take([1]).counts == (cache.offset + 1,)
    batch = model(np.repeat(want["input_ids"][:1, :9], 2, axis=0), lengths=[9, 5])
    assert_close(batch[0], want["logits_prefill"][0, :9], within, "the long row of a batch")
    assert_close(batch[1, :5], want["logits_prefill"][0, :5], within, "the short row of a batch")
    tail = want["long_logits_tail"]
    assert_close(model(want["long_input_ids"])[:, -tail.shape[1] :], tail, within, "a prompt longer than a packet")
    parallel.end(model, group)
    return "same"


def ahead(group: parallel.Group, folder: str) -> str:
    """The first rank reads two pieces of a prompt while the next rank reads nothing. (Without mx.clear_cache(), which on the CPU
    waits for all streams.)"""
    go, late = Path(folder) / "go", Path(folder) / "late"
    read = follower._read

    def reluctantly(*arguments) -> None:
        if not wait_for(go):
            late.touch()
        read(*arguments)

    follower._read = reluctantly
    try:
        model, _ = la.load_model(folder, group=group)
        state = model.make_cache()
        for _ in range(2):
            model.hidden_states(mx.zeros((1, 40), mx.int32), state)
            mx.eval(state.arrays)
        go.touch()
        parallel.end(model, group)
        return "late" if late.exists() else "ahead"
    finally:
        follower._read = read


def wait_for(file: Path, seconds: int = 20) -> bool:
    pause = threading.Event()
    return any(file.exists() or pause.wait(0.01) for _ in range(seconds * 100))


def conversation(group: parallel.Group, taken: str, kept: str) -> str:
    """Go on with a conversation that others kept, take a turn back, and keep it."""
    model, tokenizer = la.load("demo", dtype="float32", group=group)
    chat = la.Session.load(taken, model, tokenizer)
    chat.undo()
    answer = chat.send(ASK, max_tokens=4)
    chat.save(kept)
    parallel.end(model, group)
    return f"{answer} {chat.last.reused_tokens}"


def chat(group: parallel.Group, *words: str) -> str:
    return f"status {cli.main(['chat', '--parallel', group.kind, *words])}"


JOBS = {"ahead": ahead, "refused": refused, "logits": logits, "conversation": conversation, "chat": chat}
group = parallel.start("tensor")
for group.kind, job, *arguments in json.loads(sys.argv[1]):
    try:
        print(JOBS[job](group, *arguments), flush=True)
    except SystemExit as left:  # every other rank, when the first is done with this model
        assert left.code == 0 and group.rank
