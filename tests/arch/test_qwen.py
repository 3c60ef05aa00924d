"""Qwen3-Next, Qwen3.5 and their mixtures of experts against transformers' logits, in every published spelling."""

import pytest
from helpers import check_golden

from mlx_linattn.loading import load_model
from mlx_linattn.ops import use_backend

FIXTURES = [
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_untied_text",
    "qwen3_5_moe",
    "qwen3_5_moe_split_text",
    "qwen3_5_fp8",
    "qwen3_5_moe_fp8",
    "qwen3_next_fp8",
    "qwen3_5_nvfp4",
]


@pytest.mark.parametrize("name", FIXTURES)
def test_logits_are_the_references(name, fixture_folder):
    model, _ = load_model(fixture_folder(name), dtype="float32")
    check_golden(model, name)


@pytest.mark.parametrize("name", FIXTURES[:4])
def test_logits_with_the_reference_backend(name, fixture_folder):
    model, _ = load_model(fixture_folder(name), dtype="float32")
    with use_backend("reference"):
        check_golden(model, name)
