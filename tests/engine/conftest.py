"""Engines to ask."""

from __future__ import annotations

import pytest
from helpers import FIXTURES, materialize
from toy_chat import ToyTokenizer

import mlx_linattn as la
from mlx_linattn.loading import load_model


@pytest.fixture(scope="module")
def loaded():
    return la.load("demo", dtype="float32")


@pytest.fixture(scope="module")
def engine():
    with la.Engine("demo", dtype="float32", max_rows=4) as engine:
        yield engine


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A random model and a tokenizer of words without an end token: an answer goes on until something ends it."""
    model, _ = load_model(materialize(FIXTURES / "qwen3_5", tmp_path_factory.mktemp("m") / "m"), dtype="float32")
    tokenizer = ToyTokenizer(model.spec.vocab_size)
    tokenizer.eos_token_ids = set()
    return model, tokenizer


@pytest.fixture
def endless(tiny):
    with la.Engine(tiny, max_rows=2, max_queue=2, prefix_bytes=0) as engine:
        yield engine
