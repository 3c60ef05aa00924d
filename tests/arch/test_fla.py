"""flash-linear-attention's research models against its own logits."""

import pytest
from helpers import check_golden

from mlx_linattn.loading import load_model
from mlx_linattn.ops import use_backend

FIXTURES = [
    "fla_gated_deltanet",
    "fla_gated_deltanet_hybrid",
    "fla_delta_net",
    "fla_kda",
    "fla_linear_attn",
    "fla_retnet",
    "fla_gla",
    "fla_hgrn2",
]


@pytest.mark.parametrize("name", FIXTURES)
def test_logits_are_the_references(name, fixture_folder):
    model, _ = load_model(fixture_folder(name), dtype="float32")
    check_golden(model, name)
    with use_backend("reference"):
        check_golden(model, name)
