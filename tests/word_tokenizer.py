"""Tokenizer files of words for a fixture without any: the word "w12" is token 12; token 0 ends."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

TEMPLATE = (
    "{% for message in messages %}{{ 'w1 ' if message['role'] == 'user' else 'w2 ' }}{{ message['content'] }} w0 "
    "{% endfor %}{% if add_generation_prompt %}w2 {% endif %}"
)


def write(folder: Path, vocab: int) -> None:
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab)}, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w0", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
