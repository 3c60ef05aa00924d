"""Every kind of layer, dealt out to 2 and to 4 ranks, gives what it gives whole."""

from __future__ import annotations

import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from helpers import FIXTURES, assert_close, golden, materialize, tolerance

from mlx_linattn.arch import family
from mlx_linattn.model import Model
from mlx_linattn.parallel import tensor_plan
from mlx_linattn.weights import Checkpoint, load_weights

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


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_dealt_out_model_has_the_references_logits(checkpoint, ranks):
    name = checkpoint.name
    want, within = golden(name), tolerance(name)

    def work(group):
        files = Checkpoint(checkpoint)
        module = family(files.config)
        plan = tensor_plan(module.spec(files.config), ranks)
        share = plan.share(group.deal.rank)
        model = Model(share.spec)
        load_weights(model, files, module, mx.float32, share)
        plan.connect(model, group)
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
