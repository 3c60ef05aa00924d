"""Dialogues as tokens, each token with its class."""

import os

IGNORE, CONTEXT, ANSWER = 0, 1, 2  # no loss, plain text, what the assistant says


class Encoder:
    def __init__(self, path):
        from tokenizers import Tokenizer

        self.tok = Tokenizer.from_file(os.path.join(path, "tokenizer.json"))
        e = self.encode
        self.user_head, self.asst_head, self.sys_head = (
            e("<|im_start|>user\n"),
            e("<|im_start|>assistant\n"),
            e("<|im_start|>system\n"),
        )
        self.end, self.nl = e("<|im_end|>"), e("\n")
        self.empty_think, self.think_head = e("<think>\n\n</think>\n\n"), e("<think>\n")

    def encode(self, text):
        return self.tok.encode(text, add_special_tokens=False).ids

    def turn(self, user, answer, think=None):
        """(ids, classes) of a user turn and the assistant's reply. think: None (bare), "" or a thought."""
        u = self.user_head + self.encode(user) + self.end + self.nl
        a = self.encode(answer) + self.end
        head = list(self.asst_head)
        if think is None:
            given = []
        elif think == "":
            given = self.empty_think
        else:
            given, a = self.think_head, self.encode(think + "\n</think>\n\n" + answer) + self.end
        ids = u + head + given + a + self.nl
        cls = [CONTEXT] * len(u) + [IGNORE] * (len(head) + len(given)) + [ANSWER] * len(a) + [IGNORE] * len(self.nl)
        return ids, cls


CHARS_PER_TOKEN = 3.0


def prompt_ids(enc, messages, thinking=False):
    """What the chat template gives, with the generation prompt."""
    ids = []
    for m in messages:
        head = {"user": enc.user_head, "assistant": enc.asst_head, "system": enc.sys_head}[m["role"]]
        ids += head + enc.encode(m["content"]) + enc.end + enc.nl
    return ids + enc.asst_head + (enc.think_head if thinking else enc.empty_think)
