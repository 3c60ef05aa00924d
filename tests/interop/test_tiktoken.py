"""Kimi's tokenizer: a rank file and Python code become tokenizer.json, and no code runs."""

import base64
import json
from itertools import pairwise

import pytest
import regex
from helpers import FIXTURES, materialize

from mlx_linattn.convert import convert
from mlx_linattn.errors import TokenizerError
from mlx_linattn.interop import tiktoken
from mlx_linattn.interop.door import mlx_lm
from mlx_linattn.interop.tokenizer import load_tokenizer

PIECES = [
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
]
WORDS = regex.compile("|".join(PIECES), regex.V1)
CORPUS = "the cat sat on the mat, the cats' mats. 今天天气很好，今天很热。 It's 12345 o'clock;\n\n  THE END. naïve café"
TEXTS = [
    CORPUS,
    "the mat's cat\tsat   on\r\n今天the天气cat很好 aaaa aaaaaa",
    "mixed今天天WORDS很很好好 e\u0301 ∑∫ 🙂🙂 \x00 \u200b end ",
    "1234567 3.14 ١٢٣",
    "",
]
RESERVED = 6
CODE = """
import os

raise SystemExit("this code must not run")


class TikTokenTokenizer:
    num_reserved_special_tokens = %d
    pat_str = "|".join(
        [
%s
        ]
    )
"""


def encode_word(ranks, word):
    """Byte-pair encoding as tiktoken defines it: join the leftmost pair of the lowest rank until none is a token."""
    parts = [bytes([byte]) for byte in word.encode()]
    while True:
        pairs = [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not pairs:
            return [ranks[part] for part in parts]
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def learn_ranks():
    """Every byte, then the joins that occur most often in the corpus."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    names = {rank: token for token, rank in ranks.items()}
    for _ in range(150):
        counts = {}
        for word in WORDS.findall(CORPUS * 2):
            parts = [names[rank] for rank in encode_word(ranks, word)]
            for a, b in pairwise(parts):
                counts[a + b] = counts.get(a + b, 0) + 1
        if not counts:
            break
        best = max(counts, key=lambda token: (counts[token], token))
        names[len(ranks)] = best
        ranks[best] = len(ranks)
    return ranks


RANKS = learn_ranks()
ADDED = {0: "[BOS]", 1: "[EOS]", 3: "<|im_end|>", 4: "<think>", RESERVED + 1: "[PAD]"}


@pytest.fixture
def folder(tmp_path):
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in RANKS.items()]
    (tmp_path / "tiktoken.model").write_bytes(b"".join(lines))
    literals = "\n".join(f'            r"""{piece}""",' for piece in PIECES)
    (tmp_path / "tokenization_kimi.py").write_text(CODE % (RESERVED, literals))
    added = {str(len(RANKS) + i): {"content": text, "special": text != "<think>"} for i, text in ADDED.items()}
    config = {
        "added_tokens_decoder": added,
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "chat_template": "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}",
        "tokenizer_class": "TikTokenTokenizer",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def change(folder, **changes):
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_tiktokens_and_the_text_comes_back(text, folder):
    tokenizer = tiktoken.convert(folder)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == [rank for word in WORDS.findall(text) for rank in encode_word(RANKS, word)]
    assert tokenizer.decode(ids) == text


def test_han_and_latin_do_not_share_a_word(folder):
    tokenizer = tiktoken.convert(folder)
    words = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("the今天cat")]
    assert [len(word) for word in words] == [3, 6, 3]


def test_added_tokens_keep_their_ids_and_the_rest_are_placeholders(folder):
    tokenizer, base = tiktoken.convert(folder), len(RANKS)
    assert tokenizer.get_vocab_size() == base + RESERVED + 2
    for i, text in ADDED.items():
        assert tokenizer.encode(f"the{text}cat").ids[1] == base + i
    assert tokenizer.id_to_token(base + 2) == f"<|reserved_token_{base + 2}|>"
    ids = tokenizer.encode("<think>the<|im_end|>").ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>the"


def test_a_folder_with_a_rank_file_has_a_tokenizer(folder):
    tokenizer = load_tokenizer(folder, {"eos_token_id": len(RANKS) + 3})
    assert len(RANKS) + 3 in tokenizer.eos_token_ids
    assert tokenizer.bos_token == "[BOS]"
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "the 今天 cat"}])
    assert ids[-1] == len(RANKS) + 3 and tokenizer.decode(ids) == "the 今天 cat<|im_end|>"
    assert not (folder / "tokenizer.json").exists()


def test_what_is_written_needs_neither_ranks_nor_code(folder, tmp_path):
    target = tmp_path / "converted"
    tiktoken.write(folder, target)
    assert sorted(file.name for file in target.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    assert "auto_map" not in (target / "tokenizer_config.json").read_text()
    ours, theirs = load_tokenizer(folder, {}), load_tokenizer(target, {})
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)


def test_a_conversion_writes_the_tokenizer_beside_the_weights(folder, tmp_path):
    materialize(FIXTURES / "kimi_linear", folder)
    convert(folder, tmp_path / "mlx")
    written = {file.name for file in (tmp_path / "mlx").iterdir()}
    assert "tokenizer.json" in written and not written & {"tiktoken.model", "tokenization_kimi.py"}
    ours, stock = load_tokenizer(folder, {}), mlx_lm("utils").load_tokenizer(tmp_path / "mlx")
    for text in TEXTS:
        assert stock.encode(text) == ours.encode(text)


def test_streamed_text_is_the_whole_text(folder):
    tokenizer = load_tokenizer(folder, {})
    detokenizer, text = tokenizer.detokenizer, TEXTS[2].replace("\x00", "")  # which mlx_lm shows as a letter
    for token in tokenizer.encode(text):
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text == text


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("class TikTokenTokenizer:\n    pat_str = compute()\n    num_reserved_special_tokens = 6\n", "literals"),
        ("class TikTokenTokenizer:\n    pat_str = 'x'\n    num_reserved_special_tokens = True\n", "literals"),
        ("class Other:\n    pat_str = 'x'\n    num_reserved_special_tokens = 6\n", "literals"),
        ("class TikTokenTokenizer(:\n", "cannot be read"),
        ("class TikTokenTokenizer:\n    pat_str = '['\n    num_reserved_special_tokens = 6\n", "cannot be converted"),
    ],
)
def test_code_that_says_something_else_is_an_error(code, reason, folder):
    (folder / "tokenization_kimi.py").write_text(code)
    with pytest.raises(TokenizerError, match=reason):
        load_tokenizer(folder, {})


@pytest.mark.parametrize("line", [b"dGhl", b"dGhl x", b"d*l 999", b"AA== 999"])
def test_a_damaged_rank_file_is_an_error(line, folder):
    with (folder / "tiktoken.model").open("ab") as stream:
        stream.write(line + b"\n")
    with pytest.raises(TokenizerError, match="download the file again"):
        load_tokenizer(folder, {})


@pytest.mark.parametrize("reference", [None, "../../secrets.Class", "os/path.Class", ["kimi", None]])
def test_the_class_must_be_in_a_file_of_the_folder(reference, folder):
    with pytest.raises(TokenizerError, match="names no tokenizer class"):
        load_tokenizer(change(folder, auto_map={"AutoTokenizer": reference}), {})


def test_an_added_token_that_the_ranks_already_hold_is_an_error(folder):
    with pytest.raises(TokenizerError, match="already holds it"):
        load_tokenizer(change(folder, added_tokens_decoder={str(len(RANKS)): {"content": "t"}}), {})
