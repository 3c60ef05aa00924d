"""A folder with tokenizer.model and no tokenizer.json is tokenized as sentencepiece itself does it."""

import io
import json

import pytest
import sentencepiece
from helpers import needs_mlx_lm

from mlx_linattn.errors import TokenizerError
from mlx_linattn.interop.tokenizer import load_tokenizer

LINES = [
    "the cat sat on the mat",
    "a quick brown fox jumps over the lazy dog",
    "hello world, this is a test of the tokenizer.",
    "state space models and linear attention",
    "  spaces   inside  and\ttabs",
    "naïve café 日本語 😀",
]
TEXTS = ["hello world", "  two spaces  ", "the cat\n\nsat", "日本 😀 unseen ż", "123 45", "a\tb", "<turn>user\nhi"]


def train(**changes) -> bytes:
    options = {
        "vocab_size": 400, "model_type": "bpe", "byte_fallback": True, "character_coverage": 0.99, "split_digits": True,
        "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "pad_piece": "<pad>", "eos_piece": "<eos>", "bos_piece": "<bos>",
        "normalization_rule_name": "identity", "add_dummy_prefix": False, "remove_extra_whitespaces": False,
        "user_defined_symbols": ["<mask>", "<turn>", "\n\n", "▁▁"], "minloglevel": 2,
    }  # fmt: skip
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES * 20), model_writer=model, **{**options, **changes}
    )
    return model.getvalue()


GEMMA = {"config": {"model_type": "recurrent_gemma", "eos_token_id": 1}, "model": {}}
JAMBA = {
    "config": {"model_type": "jamba", "eos_token_id": 2},
    "model": {
        "add_dummy_prefix": True, "bos_id": 1, "eos_id": 2, "bos_piece": "<|startoftext|>", "eos_piece": "<|endoftext|>"
    },
}  # fmt: skip
# a class that puts a space before a text unless it is told not to, and a model of each kind
LLAMA = [{**kind, "tokenizer_config": {"tokenizer_class": "LlamaTokenizer"}} for kind in (GEMMA, JAMBA)]


@pytest.fixture(scope="module", params=[GEMMA, JAMBA, *LLAMA], ids=["gemma", "jamba", "llama", "llama_space"])
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "config.json").write_text(json.dumps(request.param["config"]))
    (folder / "tokenizer.model").write_bytes(train(**request.param["model"]))
    if "tokenizer_config" in request.param:
        (folder / "tokenizer_config.json").write_text(json.dumps(request.param["tokenizer_config"]))
    return folder


def load(folder):
    return load_tokenizer(folder, json.loads((folder / "config.json").read_text()))


@needs_mlx_lm(0, 32)
def test_ids_and_text_are_sentencepieces(folder):
    tokenizer = load(folder)
    plain = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == [plain.bos_id(), *plain.encode(text)], text
        assert tokenizer.decode(ids, skip_special_tokens=True).strip() == text.strip()
    assert tokenizer.encode(TEXTS[0], add_special_tokens=False) == plain.encode(TEXTS[0])
    assert len(tokenizer.get_vocab()) == plain.get_piece_size(), "a special token got an id of its own"
    assert tokenizer.bos_token_id == plain.bos_id()
    assert tokenizer.eos_token_ids == {plain.eos_id()}


@needs_mlx_lm(0, 32)
def test_streamed_text_is_the_whole_text(folder):
    tokenizer = load(folder)
    for text in TEXTS:
        detokenizer, streamed = tokenizer.detokenizer, ""
        detokenizer.reset()
        for number in tokenizer.encode(text, add_special_tokens=False):
            detokenizer.add_token(number)
            streamed += detokenizer.last_segment
        detokenizer.finalize()
        assert (streamed + detokenizer.last_segment).strip() == text.strip()


@needs_mlx_lm(0, 32)
def test_tokenizer_config_has_the_last_word(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    said = tmp_path / "tokenizer_config.json"
    said.write_text(json.dumps({**(json.loads(said.read_text()) if said.exists() else {}), "add_bos_token": False}))
    plain = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    assert load(tmp_path).encode("hello") == plain.encode("hello")


def test_a_damaged_file_is_a_tokenizer_error(folder, tmp_path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / "tokenizer.model").write_bytes((folder / "tokenizer.model").read_bytes()[:1000])
    with pytest.raises(TokenizerError, match="tokenizer"):
        load(tmp_path)
