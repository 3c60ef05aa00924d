"""MiniMax and Ling / Ring with Lightning attention against their references' logits."""

import pytest
from helpers import check_golden

from mlx_linattn.loading import load_model
from mlx_linattn.ops import use_backend

FIXTURES = ["minimax_text_01", "minimax_hf", "bailing_moe_linear", "bailing_hybrid_v25"]


@pytest.mark.parametrize("name", FIXTURES)
def test_logits_are_the_references(name, fixture_folder):
    model, _ = load_model(fixture_folder(name), dtype="float32")
    check_golden(model, name)


@pytest.mark.parametrize("name", FIXTURES)
def test_logits_with_the_reference_backend(name, fixture_folder):
    model, _ = load_model(fixture_folder(name), dtype="float32")
    with use_backend("reference"):
        check_golden(model, name)
