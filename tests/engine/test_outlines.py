"""Structured output by outlines: its own processors, in an engine and by its own way into mlx_lm."""

from __future__ import annotations

import json
import re

import mlx.core as mx
import numpy as np
import outlines
import pytest
from outlines import backends
from outlines_core.kernels import mlx as kernels

import mlx_linattn as la

QUESTION = "My dog is called Pepper. What is my dog's name?"


@pytest.fixture(scope="module", autouse=True)
def its_kernel_where_there_is_no_metal():
    """outlines masks logits with a Metal kernel; elsewhere the same mask in MLX operations takes its place."""

    def apply(logits, mask):
        bits = np.unpackbits(np.array(mask).view(np.uint8), bitorder="little")[: logits.shape[-1]]
        return mx.where(mx.array(bits.astype(bool)), logits, -mx.inf)

    with pytest.MonkeyPatch.context() as patch:
        if not mx.metal.is_available():
            patch.setattr(kernels, "apply_token_bitmask", apply)
        yield


@pytest.fixture(scope="module")
def loaded():
    return la.load("demo")


def test_answers_of_one_engine_each_with_a_grammar_of_its_own(loaded):
    guide = outlines.from_mlxlm(*loaded)
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "old": {"type": "boolean"}}, "required": ["name", "old"]}  # fmt: skip
    schema = backends.get_json_schema_logits_processor("outlines_core", guide, json.dumps(schema))
    numbers = [backends.get_regex_logits_processor("outlines_core", guide, r"(yes|no), [0-9]{3}") for _ in range(2)]
    with la.Engine(loaded) as engine:
        streams = [engine.submit(QUESTION, logits_processors=[one], max_tokens=60) for one in (schema, *numbers)]
        plain = engine.submit(QUESTION)
        answers = [stream.result() for stream in streams]
        assert plain.result().text == "Your dog's name is Pepper."
    found = json.loads(answers[0].text)
    assert set(found) == {"name", "old"} and isinstance(found["old"], bool)
    assert answers[1].text == answers[2].text and re.fullmatch(r"(yes|no), [0-9]{3}", answers[1].text)
    assert all(answer.done.finish_reason == "stop" for answer in answers)


def test_outlines_takes_our_model_for_one_of_mlx_lm(loaded):
    guide = outlines.from_mlxlm(*loaded)
    assert guide(QUESTION, max_tokens=20) == "Your dog's name is Pepper."
    assert re.fullmatch(r"(yes|no), [0-9]{3}", guide(QUESTION, outlines.regex(r"(yes|no), [0-9]{3}"), max_tokens=20))
