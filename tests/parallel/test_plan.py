"""Every kind of layer, dealt out to 2 and to 4 ranks, gives what it gives whole."""

from __future__ import annotations

import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from helpers import FIXTURES, assert_close, golden, materialize, tolerance
from mlx.utils import tree_flatten

from mlx_linattn import convert
from mlx_linattn.arch import family
from mlx_linattn.cuts import Block, Cut, Deal, Uneven
from mlx_linattn.layers import Ranks
from mlx_linattn.layout import unprefixed
from mlx_linattn.loading import load_model, resolve
from mlx_linattn.model import Model
from mlx_linattn.parallel import stored_groups, tensor_plan
from mlx_linattn.weights import Checkpoint, load_weights, tensors

sys.path.insert(0, str(Path(__file__).parent))

from simulated import on_ranks

# Each mixer and MLP, and each way to lay one out.
KINDS = (
    "bailing_hybrid_v25", "bailing_moe_linear", "fla_gated_deltanet_hybrid", "fla_gla", "fla_hgrn2", "fla_kda",
    "fla_linear_attn", "fla_retnet", "jamba", "kimi_k3", "kimi_linear", "minimax_text_01", "olmo_hybrid", "qwen3_5_fp8",
    "qwen3_next", "recurrent_gemma",
)  # fmt: skip


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request, tmp_path_factory):
    return materialize(FIXTURES / request.param, tmp_path_factory.mktemp("parallel") / request.param)


def part(folder: Path, ranks: int, group, dtype=mx.float32):
    """One rank's part of a model, and how the model is dealt out."""
    files = Checkpoint(folder)
    module = family(files.config)
    spec = module.spec(files.config)
    shapes = {unprefixed(name, module.PREFIXES): info.shape for name, info in files.tensors.items()}
    plan = tensor_plan(spec, ranks, stored_groups(dict(module.names(spec)), shapes if files.is_mlx else {}))
    share = plan.share(group.deal.rank)
    model = Model(share.spec)
    load_weights(model, files, module, dtype, share)
    plan.connect(model, group)
    return model, plan


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_dealt_out_model_has_the_references_logits(checkpoint, ranks):
    name = checkpoint.name
    want, within = golden(name), tolerance(name)

    def work(group):
        model, _ = part(checkpoint, ranks, group)
        cache = model.make_cache()
        prefill = model(want["input_ids"], cache)
        before = cache.snapshot()
        steps = [np.array(model(want["decode_ids"][:, i : i + 1], cache)) for i in range(3)]
        cache.restore(before)
        again = np.array(model(want["decode_ids"][:, :1], cache))
        batch = model(np.repeat(want["input_ids"][:1, :9], 2, axis=0), lengths=[9, 5])
        return np.array(prefill), np.concatenate(steps, axis=1), again, np.array(batch)

    for prefill, steps, again, batch in on_ranks(ranks, work):
        assert_close(prefill, want["logits_prefill"], within, "prefill")
        assert_close(steps, want["logits_decode"][:, :3], within, "decode")
        assert_close(again, want["logits_decode"][:, :1], within, "decode after going back")
        assert_close(batch[0], want["logits_prefill"][0, :9], within, "the long row of a batch")
        assert_close(batch[1, :5], want["logits_prefill"][0, :5], within, "the short row of a batch")


@pytest.fixture(scope="module", params=[32, 64])
def quantized(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel") / str(request.param)
    convert("demo", folder, quantize=True, q_bits=4, q_group_size=request.param, verify=False)
    return request.param, folder


def test_quantized_weights_are_cut_between_their_groups(quantized):
    """448 features halve into 7 groups of 32, but not into groups of 64: then the MLPs stay whole, and that is said."""
    group_size, folder = quantized
    ids = np.random.default_rng(0).integers(0, 3000, (1, 40))
    whole, _ = load_model(folder, dtype="float32")
    want = np.array(whole(ids))

    def work(group):
        model, plan = part(folder, 2, group)
        return np.array(model(ids)), plan.left_whole()

    for logits, told in on_ranks(2, work):
        assert_close(logits, want, 1e-3, "logits")
        reason = "mlp of 8 layers: mlp.down_proj is quantized in groups of 64 inputs, and 2 ranks would cut through one"
        assert told == (() if group_size == 32 else (reason,))


def test_a_rank_reads_no_more_than_its_part(checkpoint, monkeypatch):
    """Nothing that is cut is read whole, but for short vectors in odd shapes."""
    read_whole, original = set(), tensors._part

    def watched(held, take, share, parameter, dtype):
        array = original(held, take, share, parameter, dtype)
        cut = share.cut(parameter)
        if array is None and cut is not None and cut.blocks:
            read_whole.add(parameter.rpartition("mixer.")[2])
        return array

    monkeypatch.setattr(tensors, "_part", watched)
    part(checkpoint, 2, Ranks(Deal(1, 2)))
    if checkpoint.name not in ("qwen3_5_fp8", "kimi_k3"):  # these are smaller than two of their blocks
        assert read_whole <= {"A_log", "dt_bias", "decay_bound"}


def test_memory_of_a_load_is_the_parts():
    folder = resolve("demo")
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    model, _ = part(folder, 4, Ranks(Deal(1, 4)), dtype=None)
    weights = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    assert weights < 0.28 * (folder / "model.safetensors").stat().st_size
    assert mx.get_peak_memory() - before < 1.5 * weights


def test_heads_that_do_not_divide_stay_whole():
    deal = Deal(1, 3)
    with pytest.raises(Uneven, match="4 heads do not divide among 3 ranks"):
        deal.even(4, "heads")
    assert deal.spread(1, "key heads") == 1
    assert Cut(-1, (Block(3, 2), Block(6))).ranges(deal) == [(2, 4), (8, 10)]
    with pytest.raises(Uneven):
        Cut(-1, (Block(3, 2),)).ranges(deal, 2)
