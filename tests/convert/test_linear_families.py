"""Lightning, RG-LRU and Mamba models after conversion: the same logits, here and in stock mlx_lm where it is right."""

import mlx.core as mx
import pytest
from helpers import assert_close, check_golden, golden, needs_mlx_lm
from stock import stock_model

from mlx_linattn.convert import convert
from mlx_linattn.loading import load_model

RIGHT_IN_STOCK = ["bailing_moe_linear", "bailing_hybrid_v25", "jamba_dense", "mamba", "falcon_mamba"]
OTHERS = ["minimax_text_01", "minimax_hf", "recurrent_gemma", "jamba"]


@pytest.mark.parametrize("name", RIGHT_IN_STOCK + OTHERS)
def test_logits_are_the_references_after_conversion(name, fixture_folder, tmp_path):
    convert(fixture_folder(name), tmp_path / "mlx")
    model, _ = load_model(tmp_path / "mlx")
    check_golden(model, name)


@pytest.mark.parametrize("name", RIGHT_IN_STOCK)
def test_quantized_logits_are_stock_mlx_lms(name, fixture_folder, tmp_path):
    convert(fixture_folder(name), tmp_path / "mlx", quantize=True, q_bits=8, q_group_size=32)
    model, config = load_model(tmp_path / "mlx")
    assert config["quantization"]["bits"] == 8
    ids = mx.array(golden(name)["input_ids"])
    stock = stock_model(tmp_path / "mlx")
    assert_close(model(ids), stock(ids, stock.make_cache()), 1e-4, name)


@needs_mlx_lm(0, 32)
def test_stock_mlx_lm_refuses_a_converted_minimax_instead_of_building_another_model(fixture_folder, tmp_path):
    convert(fixture_folder("minimax_hf"), tmp_path / "mlx")
    with pytest.raises(ValueError, match=r"modeling_mlx\.py.*trust_remote_code"):
        stock_model(tmp_path / "mlx")
