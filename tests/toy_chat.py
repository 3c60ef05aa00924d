"""A chat tokenizer of words for models without one: word "w12" is token 12, and templates do what real ones do."""

from __future__ import annotations

from types import SimpleNamespace

SPECIAL = ["<end>", "<user>", "<assistant>", "<system>", "<tool>", "<think>", "</think>", "\n"]
END, USER, ASSISTANT, SYSTEM, TOOL, THINK, UNTHINK, NEWLINE = range(8)
ROLES = {"user": USER, "assistant": ASSISTANT, "system": SYSTEM, "tool": TOOL}


class ToyTokenizer:
    """``thinking``: answers open in a thought, and thoughts of earlier turns are left out.  ``dated``: the system message
    begins with the number of renderings so far."""

    has_chat_template, has_thinking = True, True
    think_start, think_end = "<think>", "</think>"
    bos_token, eos_token_ids = None, {END}
    chat_template = "toy"

    def __init__(self, vocab: int, thinking: bool = False, dated: bool = False):
        self.vocab, self.thinking, self.dated = vocab, thinking, dated
        self.words = [*SPECIAL, *(f"w{i}" for i in range(len(SPECIAL), vocab))]
        self.ids = {word: i for i, word in enumerate(self.words)}
        self.day = 0

    def get_vocab(self):
        return self.ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [self.ids[word] for word in text.replace("\n", " \n ").split(" ") if word]

    def decode(self, ids) -> str:
        return " ".join(self.words[i] for i in ids)

    def apply_chat_template(self, messages, add_generation_prompt: bool, **_) -> list[int]:
        ids: list[int] = []
        last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
        if self.dated:
            ids += [SYSTEM, 8 + self.day % (self.vocab - 8), END]
        for i, message in enumerate(messages):
            ids.append(ROLES[message["role"]])
            if message.get("reasoning_content") and i > last:
                ids += [THINK, *self.encode(message["reasoning_content"]), UNTHINK]
            ids += [*self.encode(message["content"]), END]
        if add_generation_prompt:
            ids += [ASSISTANT, *([THINK, NEWLINE] if self.thinking else [])]
        return ids

    @staticmethod
    def _last(ids, token) -> int:
        return max((i for i, one in enumerate(ids) if one == token), default=-1)

    def rfind_think_start(self, ids):
        return self._last(ids, THINK)

    def rfind_think_end(self, ids):
        return self._last(ids, UNTHINK)

    @property
    def detokenizer(self):
        shown = SimpleNamespace(ids=[], offset=0)

        class Detokenizer:
            def add_token(_, token):
                shown.ids.append(token)

            def finalize(_):
                pass

            @property
            def last_segment(_):
                text = self.decode(shown.ids)
                segment, shown.offset = text[shown.offset :], len(text)
                return segment

        return Detokenizer()
