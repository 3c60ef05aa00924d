"""RecurrentGemma, Jamba, Mamba and Falcon-Mamba against transformers' logits."""

import pytest
from helpers import check_golden

from mlx_linattn.loading import load_model
from mlx_linattn.ops import use_backend

FIXTURES = ["recurrent_gemma", "jamba", "jamba_dense", "mamba", "falcon_mamba"]


@pytest.mark.parametrize("name", FIXTURES)
def test_logits_are_the_references(name, fixture_folder):
    model, _ = load_model(fixture_folder(name), dtype="float32")
    check_golden(model, name)


@pytest.mark.parametrize("name", FIXTURES)
def test_logits_with_the_reference_backend(name, fixture_folder):
    model, _ = load_model(fixture_folder(name), dtype="float32")
    with use_backend("reference"):
        check_golden(model, name)
