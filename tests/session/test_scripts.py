"""Whatever is done to a conversation, its state is that of a fresh read of its tokens, and little is read twice."""

from __future__ import annotations

import json
import os
import random
from functools import lru_cache

import mlx.core as mx
import pytest
from helpers import FIXTURES, assert_close, materialize
from toy_chat import ToyTokenizer

from mlx_linattn import Session
from mlx_linattn.errors import LinAttnError, RequestError
from mlx_linattn.loading import load_model
from mlx_linattn.session.timeline import shared_prefix

SCRIPTS = int(os.environ.get("MLX_LINATTN_SCRIPTS", "304"))  # in all, over the families
STORED_ELSEWISE = ("fp8", "nvfp4", "split_text")  # fixtures that differ from others in how weights are stored only
FAMILIES = [
    path.name
    for path in sorted(FIXTURES.iterdir())
    if (path / "config.json").exists() and not path.name.endswith(STORED_ELSEWISE)
]


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    @lru_cache
    def load(name):
        folder = materialize(FIXTURES / name, tmp_path_factory.mktemp("families") / name)
        return load_model(folder, dtype="float32")[0]

    return load


class Broken(Exception):
    pass


class Script:
    """Random operations on one session; after each one, the promises."""

    def __init__(self, model, rng: random.Random):
        self.model, self.rng = model, rng
        vocab = model.spec.vocab_size
        self.tokenizer = ToyTokenizer(vocab, thinking=rng.random() < 0.5, dated=rng.random() < 0.3)
        budget = rng.choice([1 << 40, 1 << 40, 200_000, 0])
        bounded = 12 if rng.random() < 0.25 else None
        self.session = Session(
            model, self.tokenizer, system=self.words(9), checkpoint_bytes=budget, max_kv_size=bounded
        )
        self.sessions = [self.session]

    def words(self, most: int) -> str:
        high = min(self.tokenizer.vocab, 80)
        return " ".join(f"w{self.rng.randrange(8, high)}" for _ in range(self.rng.randint(1, most)))

    def run(self) -> None:
        for _ in range(self.rng.randint(4, 8)):
            self.session = self.rng.choice(self.sessions)
            self.tokenizer.day += self.rng.random() < 0.3
            operation = self.rng.choice(
                ["send", "send", "send", "tool", "retry", "undo", "redo", "edit", "go_on", "fork", "assign", "system"]
            )
            before = list(self.session.messages)
            self.had = (self.session.tokens, self.session.checkpoints)
            self.session.last = None
            try:
                getattr(self, operation)()
            except RequestError:
                assert self.session.messages == before, f"{operation} was refused, but changed messages"
            self.check(operation)

    # Operations

    def send(self):
        self.turn(self.session.stream, self.words(70 if self.rng.random() < 0.2 else 9))

    def tool(self):
        self.turn(self.session.stream, [{"role": "tool", "content": self.words(6)} for _ in range(2)])

    def retry(self):
        self.turn(self.session.stream_retry)

    def go_on(self):
        self.turn(self.session.stream_continue)

    def undo(self):
        self.session.undo(self.rng.choice([1, 1, 2]))

    def redo(self):
        self.session.redo()

    def edit(self):
        count = len(self.session.messages)
        i = self.rng.randrange(-count, count) if count else 0
        text = self.session.messages[i]["content"] if count else ""
        self.session.edit(i, " ".join(text.split(" ")[: self.rng.randint(1, 9)]) or "w9")
        if self.session.messages[-1]["role"] == "assistant":
            self.turn(self.session.stream_continue)
        else:
            self.turn(self.session.stream)

    def fork(self):
        self.sessions.append(self.session.fork())

    def assign(self):
        roles = ["user", "assistant"] * self.rng.randint(0, 2)
        self.session.messages = [{"role": role, "content": self.words(12)} for role in roles]

    def system(self):
        words = (self.session.system or "w8").split(" ")
        self.session.system = self.rng.choice([None, " ".join([*words[:-1], "w9"]), self.words(9)])

    def turn(self, stream, *arguments):
        """A turn that ends, or is cancelled, left or broken at a random step."""
        before = list(self.session.messages)
        how = self.rng.choice(["end", "end", "end", "cancel", "leave", "break", "break_reading", "cancel_reading"])
        at = self.rng.randint(0, 3)
        step = 0

        def sampler(logprobs):
            nonlocal step
            step += 1
            if how == "break" and step > at:
                raise Broken
            return mx.argmax(logprobs, axis=-1)

        def progress(done, total):
            if how == "break_reading" and done >= at:
                raise Broken
            if how == "cancel_reading" and done >= at:
                self.session.cancel()

        options = {"max_tokens": self.rng.randint(1, 12), "sampler": sampler, "progress": progress}
        options["prefill_step_size"] = self.rng.choice([None, 1, 3, 16])
        try:
            for count, _ in enumerate(stream(*arguments, **options)):
                if how == "leave" and count == at:
                    break
                if how == "cancel" and count == at:
                    self.session.cancel()
        except Broken:
            assert self.session.messages == before, "an error changed the messages"

    # Promises

    def check(self, operation: str) -> None:
        session = self.session
        tokens, state = session.tokens, session.state
        assert state.offset == len(tokens), f"{operation}: the state holds {state.offset} of {len(tokens)} tokens"
        assert session.checkpoint_nbytes <= session._timeline.room
        if tokens:
            probe = mx.array([[8]])
            want = self.model(mx.array([[*tokens, 8]]), self.model.make_cache(state.options))[:, -1]
            assert_close(self.model(probe, state.fork())[:, -1], want, 1e-4, f"logits after {operation}")
        self.check_reuse(operation)

    def check_reuse(self, operation: str) -> None:
        last, (tokens, checkpoints) = self.session.last, self.had
        if last is None:
            return
        assert last.reused_tokens + last.prefilled_tokens == last.prompt_tokens
        read = self.session.tokens[: last.prompt_tokens]
        if len(read) < last.prompt_tokens:  # cancelled while reading
            return
        limit = min(shared_prefix(tokens, read), last.prompt_tokens - 1)
        nearest = max([0, *(n for n in [*checkpoints, len(tokens)] if n <= limit)])
        assert last.reused_tokens >= nearest, f"{operation}: {last.reused_tokens} reused, {nearest} could have been"


@pytest.mark.parametrize("name", FAMILIES)
def test_random_scripts_leave_the_state_of_a_fresh_read(name, family):
    count = -(-SCRIPTS // len(FAMILIES))
    for seed in range(count):
        script = Script(family(name), random.Random(f"{name} {seed}"))
        try:
            script.run()
        except (AssertionError, LinAttnError) as error:
            raise AssertionError(f"{name}, script {seed}: {error}") from error


def test_the_families_are_known():
    assert set(FAMILIES) <= set(json.loads((FIXTURES / "index.json").read_text()))
    assert len(FAMILIES) >= 4
