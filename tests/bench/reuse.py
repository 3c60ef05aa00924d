"""How much of a prompt is reused after common changes to a conversation. Run: python tests/bench/reuse.py

System message 200 tokens, user 300, beginning of the answer 2, answer 400, as in the table of mlx_lm 0.32.2 that was measured
with its LRUPromptCache. "all" is what a cache that could be cut anywhere would reuse.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import mlx.core as mx
from helpers import FIXTURES, materialize
from toy_chat import ASSISTANT, END, NEWLINE, THINK, UNTHINK, ToyTokenizer

from mlx_linattn import Session
from mlx_linattn.loading import load_model

MLX_LM = {"next turn": "902/952", "thinking stripped": "500/850", "edit in the question": "200/500",
          "end of system changed": "0/500", "half the answer kept": "500/703"}  # fmt: skip


class Template(ToyTokenizer):
    def apply_chat_template(self, messages, add_generation_prompt, **_):
        ids = []
        for message in messages:
            start = len(ids)
            ids += super().apply_chat_template([{**message, "reasoning_content": None}], False)  # thoughts are left out
            if message["role"] == "assistant":
                ids[start + 1 : start + 1] = [NEWLINE]
        return [*ids, ASSISTANT, NEWLINE] if add_generation_prompt else ids


def words(count: int, seed: int) -> str:
    return " ".join(f"w{8 + (seed * 7 + i * i) % 70}" for i in range(count))


def session(model, answer: list[int], **options) -> Session:
    """A session after its first turn: 200 + 300 + 2 + 400 tokens."""
    chat = Session(model, Template(model.spec.vocab_size), system=words(198, 1), **options)
    script = iter([*answer, END])  # one more is chosen ahead
    chat.send(words(298, 2), max_tokens=400, sampler=lambda logprobs: mx.array([next(script)]))
    assert len(chat.tokens) == 902, len(chat.tokens)
    return chat


def rows(model) -> list[tuple[str, int, int, int]]:
    """(what, reused, all that could be, prompt)"""
    plain = [8 + i % 70 for i in range(399)] + [END]
    thought = [THINK, *plain[:100], UNTHINK, *plain[:297], END]
    found = []

    def row(what, chat, possible, call):
        call(max_tokens=1)
        found.append((what, chat.last.reused_tokens, possible, chat.last.prompt_tokens))

    told = session(model, plain)
    chat = told.fork()
    row("next turn", chat, 902, lambda **o: chat.send(words(46, 3), **o))
    chat = session(model, thought)
    row("thinking stripped", chat, 502, lambda **o: chat.send(words(46, 3), **o))
    chat = told.fork()
    text = chat.messages[0]["content"].split(" ")
    chat.edit(0, " ".join([*text[:149], "w79", *text[150:]]))
    row("edit in the question", chat, 350, chat.send)
    chat = told.fork()
    chat.system = " ".join([*chat.system.split(" ")[:-1], "w79"])
    chat.messages = chat.messages[:1]
    row("end of system changed", chat, 198, chat.send)
    chat = told.fork()
    chat.edit(-1, " ".join(chat.messages[-1]["content"].split(" ")[:200]))
    row("half the answer kept", chat, 701, chat.continue_)
    return found


def anywhere(model) -> tuple[float, float]:
    """Tokens read again, on average, for a change at any place of the question, and of the answer."""
    plain = [8 + i % 70 for i in range(399)] + [END]
    first = session(model, plain)
    ends = sorted({0, *first.checkpoints})

    def again(places):
        return sum(n - max(c for c in ends if c <= n) for n in places) / len(places)

    return again(range(200, 500)), again(range(502, 902))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model, _ = load_model(materialize(FIXTURES / "qwen3_5", Path(folder) / "model"), dtype="float32")
        print(f"{'':24}{'reused':>10}{'all':>10}{'mlx_lm':>10}")
        for what, reused, possible, prompt in rows(model):
            print(f"{what:24}{f'{reused}/{prompt}':>10}{f'{possible}/{prompt}':>10}{MLX_LM[what]:>10}")
        question, answer = anywhere(model)
        print(
            f"a change anywhere: {question:.0f} tokens read twice on average in the question, {answer:.0f} in the answer"
        )


if __name__ == "__main__":
    main()
