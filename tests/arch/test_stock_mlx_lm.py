"""Our MLX layout is stock mlx_lm's, tensor for tensor, and so are the logits where stock mlx_lm is right."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from helpers import assert_close, golden, largest_difference, tolerance
from mlx.utils import tree_flatten
from stock import convert, difference, our_layout, stock_model

from mlx_linattn.loading import load_model
from mlx_linattn.weights.checkpoint import Checkpoint

RIGHT = [
    "kimi_linear",
    "olmo_hybrid",
    "bailing_hybrid_v3",
    "bailing_moe_linear",
    "bailing_hybrid_v25",
    "jamba_dense",
    "mamba",
    "falcon_mamba",
]
WRONG = ["jamba", "recurrent_gemma"]  # and why: below


@pytest.mark.parametrize("name", RIGHT + WRONG)
def test_layout_is_stock_mlx_lms(name, fixture_folder):
    folder = fixture_folder(name)
    stock = dict(tree_flatten(stock_model(folder).parameters()))
    ours = our_layout(folder)
    assert ours.keys() == stock.keys()
    for tensor, value in ours.items():
        assert_close(value, stock[tensor], 0.0, tensor)


@pytest.mark.parametrize("name", RIGHT)
def test_logits_are_stock_mlx_lms(name, fixture_folder):
    folder, ids = fixture_folder(name), golden(name)["long_input_ids"]
    model, _ = load_model(folder)
    stock = stock_model(folder)
    assert_close(model(ids), stock(mx.array(ids), stock.make_cache()), tolerance(name), name)


def test_jamba_differs_because_stock_mlx_lm_renormalises_the_experts_weights(fixture_folder):
    folder, want = fixture_folder("jamba"), golden("jamba")
    stock = stock_model(folder)
    assert largest_difference(stock(mx.array(want["input_ids"])), want["logits_prefill"]) > 0.1

    def shares_of_all(moe, x):
        chosen = mx.argpartition(-moe.router(x), kth=moe.num_experts_per_tok - 1, axis=-1)[
            ..., : moe.num_experts_per_tok
        ]
        weights = mx.take_along_axis(mx.softmax(moe.router(x), axis=-1), chosen, axis=-1)
        return (moe.switch_mlp(x, chosen) * weights[..., None]).sum(-2)

    for layer in stock.layers:
        if hasattr(layer.feed_forward, "router"):
            layer.feed_forward.__class__ = type("Moe", (type(layer.feed_forward),), {"__call__": shares_of_all})
    assert_close(stock(mx.array(want["input_ids"])), want["logits_prefill"], tolerance("jamba"), "mended")


def test_recurrent_gemma_differs_because_stock_mlx_lm_does_not_round_the_embedding_scale(fixture_folder):
    folder, want = fixture_folder("recurrent_gemma"), golden("recurrent_gemma")
    stock = stock_model(folder)
    assert largest_difference(stock(mx.array(want["input_ids"])), want["logits_prefill"]) > 1e-3
    scale = load_model(folder)[0].spec.embedding_scale

    class Rounded(nn.Embedding):
        def __call__(self, ids):
            return super().__call__(ids) * scale

    stock.model.scale_by_sqrt_dim = False
    stock.model.embed_tokens.__class__ = Rounded
    for layer in stock.layers:  # its other difference: an eps of its own
        layer.temporal_pre_norm.eps = layer.channel_pre_norm.eps = 1e-6
    assert_close(stock(mx.array(want["input_ids"])), want["logits_prefill"], tolerance("recurrent_gemma"), "mended")


@pytest.mark.parametrize("name", [*RIGHT[3:], *WRONG])
def test_what_stock_mlx_lm_quantizes_loads_here(name, fixture_folder, tmp_path):
    folder = convert(fixture_folder(name), tmp_path / "quantized", {"group_size": 32, "bits": 8})
    assert any(tensor.endswith(".scales") for tensor in Checkpoint(folder).tensors)
    model, _ = load_model(folder)
    within = 1e-3 if name in RIGHT else 0.5 * golden(name)["logits_prefill"].std()  # that much it is wrong
    assert difference(model, stock_model(folder), name) < within
