"""Trains the byte-level BPE."""

import json
import os
import random
from pathlib import Path

from dialogue import Dialogue
from passages import Filler, structured_block, synthetic_paragraph

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
THINK = ["<think>", "</think>"]
TEMPLATE = (Path(__file__).parents[2] / "mlx_linattn/data/demo/chat_template.jinja").read_text(encoding="utf-8")
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(out, vocab=3072, seed=1):
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    r = random.Random(seed)
    filler = Filler("train")
    texts = []
    for _ in range(6000):
        d = Dialogue(r, filler)
        for f in [d.tell, d.tell, d.tell2, d.ask, d.change, d.ask_unknown, d.check, d.chat, d.list, d.forget]:
            u, a, th = f()
            texts += [u, a, th] if r.random() < 0.3 else [u, a]
        texts += [synthetic_paragraph(r) for _ in range(2)]
        if r.random() < 0.1:
            texts.append(structured_block(r))
    texts += r.sample(filler.prose, min(9000, len(filler.prose))) + r.sample(filler.code, min(600, len(filler.code)))
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    n_added = len(SPECIAL) + len(THINK)
    tok.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab - n_added,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=[],
            show_progress=False,
            max_token_length=16,
        ),
    )
    tok.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIAL])
    tok.add_tokens([AddedToken(s, special=False, normalized=False) for s in THINK])
    os.makedirs(out, exist_ok=True)
    tok.save(os.path.join(out, "tokenizer.json"))
    ids = {s: tok.token_to_id(s) for s in SPECIAL + THINK}
    added = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "add_bos_token": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": False,
        "model_max_length": 262144,
        "added_tokens_decoder": {
            str(ids[s]): {"content": s, **added, "special": s in SPECIAL} for s in SPECIAL + THINK
        },
        "chat_template": TEMPLATE,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False)
    Path(out, "tokenizer_config.json").write_text(text, encoding="utf-8")
    Path(out, "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    n = sum(len(x) for x in texts[:20000])
    m = sum(len(e.ids) for e in tok.encode_batch(texts[:20000]))
    p = filler.prose[:500]
    print(
        "vocab",
        tok.get_vocab_size(),
        ids,
        "chars/token dialogue %.2f" % (n / m),
        "prose %.2f" % (sum(map(len, p)) / sum(len(e.ids) for e in tok.encode_batch(p))),
    )
