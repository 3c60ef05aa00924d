"""Every kind of layer, in runs of layers on as many ranks as there are, or on three, gives what it gives whole."""

from __future__ import annotations

import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from helpers import FIXTURES, assert_close, golden, materialize, tolerance
from mlx.utils import tree_flatten

from mlx_linattn import load_model
from mlx_linattn.arch import family
from mlx_linattn.cuts import Uneven
from mlx_linattn.layers import Ranks
from mlx_linattn.loading import resolve
from mlx_linattn.model import Model
from mlx_linattn.parallel import stage_sizes, stages
from mlx_linattn.parallel.arrangement import described, kinds_of
from mlx_linattn.parallel.pipeline import Pipeline
from mlx_linattn.weights import Checkpoint, load_weights

sys.path.insert(0, str(Path(__file__).parent))

from simulated import Threads, on_ranks

# Each mixer, each residual stream, tied and untied heads, and layers with and without an MLP.
KINDS = (
    "bailing_hybrid_v25", "fla_hgrn2", "jamba", "kimi_k3", "kimi_linear", "mamba", "minimax_text_01", "olmo_hybrid",
    "qwen3_5_fp8", "qwen3_next", "recurrent_gemma",
)  # fmt: skip


def part(folder: Path, group, dtype=mx.float32) -> tuple[Model, Pipeline]:
    files = Checkpoint(folder)
    module = family(files.config)
    pipeline = Pipeline.of(files, module, group)
    model = Model(pipeline.share.spec)
    load_weights(model, files, module, dtype, pipeline.share)
    pipeline.connect(model)
    return model, pipeline


def close(got, want, within: float, what: str) -> None:
    """The same numbers, dtypes and shapes, in all the lists there are."""
    if isinstance(want, (list, tuple)):
        assert len(got) == len(want), what
        for one, other in zip(got, want):
            close(one, other, within, what)
    elif isinstance(want, mx.array):
        assert got.dtype == want.dtype
        assert_close(got, want, within, what)
    else:
        assert got == want, what


@pytest.mark.parametrize("name", KINDS)
def test_a_model_in_stages_has_the_references_logits(name, tmp_path):
    """Also after going back, in a batch, and of a state that was put together for a file and dealt out again."""
    folder = materialize(FIXTURES / name, tmp_path / name)
    want, within = golden(name), tolerance(name)
    whole, _ = load_model(folder, dtype="float32")
    state = whole.make_cache()
    whole(want["input_ids"][:1], state)
    moment = state.snapshot()
    whole(want["decode_ids"][:1, :1], state)
    parts, after = state.dump([moment]), whole(want["decode_ids"][:1, 1:2], state)
    sampled = whole.sampled(8)
    mx.eval(parts, after, [sample for *_, sample in sampled])
    layout, arrays = described(parts)

    length = want["input_ids"].shape[1] + 1

    def work(group):
        model, pipeline = part(folder, group)
        read = model if group.rank == 0 else model.hidden_states  # the first rank makes the logits
        cache = model.make_cache()
        prefill = read(want["input_ids"], cache)
        before = cache.snapshot()
        steps = [read(want["decode_ids"][:, i : i + 1], cache) for i in range(3)]
        cache.restore(before)
        again = read(want["decode_ids"][:, :1], cache)
        batch = read(np.repeat(want["input_ids"][:1, :9], 2, axis=0), lengths=[9, 5])
        given = arrays if group.rank == 0 else [None] * len(arrays)
        taken = model.make_cache()
        (back,) = pipeline.loaded(taken, layout, kinds_of(arrays), [length, length - 1], given)
        dumped = pipeline.dumped(taken, [back])
        on = read(want["decode_ids"][:1, 1:2], taken)
        taken.restore(back)
        read(want["decode_ids"][:1, :1], taken)
        redone = read(want["decode_ids"][:1, 1:2], taken)
        weights = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
        logits = [np.array(x) for x in (prefill, mx.concatenate(steps, axis=1), again, batch, on, redone)]
        sampled = pipeline.sampled(model, 8)
        mx.eval([sample for *_, sample in sampled])
        return logits, dumped, sampled, weights

    found = on_ranks(min(3, len(whole.layers)), work)
    (prefill, steps, again, batch, on, redone), dumped, named, _ = found[0]
    assert_close(prefill, want["logits_prefill"], within, "prefill")
    assert_close(steps, want["logits_decode"][:, :3], within, "decode")
    assert_close(again, want["logits_decode"][:, :1], within, "decode after going back")
    assert_close(batch[0], want["logits_prefill"][0, :9], within, "the long row of a batch")
    assert_close(batch[1, :5], want["logits_prefill"][0, :5], within, "the short row of a batch")
    close(dumped, parts, 0.0, "a state that was dealt out and put together")
    assert_close(on, after, within, "decode of a state that was dealt out")
    assert_close(redone, after, within, "decode after going back in it")
    close(named, sampled, 0.0, "samples of the weights")
    weights = sum(array.nbytes for _, array in tree_flatten(whole.parameters()))
    assert sum(one[-1] for one in found) == weights, "nothing is held twice"


def test_memory_of_a_load_is_the_stages():
    files = Checkpoint(resolve("demo"))
    module = family(files.config)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    stage = Pipeline.of(files, module, Threads(2, [None] * 4)).share
    model = Model(stage.spec)
    load_weights(model, files, module, None, stage)
    weights = sum(array.nbytes for name, array in tree_flatten(model.parameters()) if stage.has(name))
    assert weights < 0.28 * (resolve("demo") / "model.safetensors").stat().st_size
    assert mx.get_peak_memory() - before < 1.5 * weights


@pytest.mark.parametrize("name", KINDS)
def test_what_travels_has_the_embeddings_dtype(name, tmp_path):
    """So the next rank knows it: also with weights of 16 bits."""
    model, _ = load_model(materialize(FIXTURES / name, tmp_path / name), dtype="bfloat16", lazy=True)

    class Watching(Ranks):
        def arriving(self, x):
            self.dtype = (x[1] if isinstance(x, tuple) else x).dtype
            return x

        def leaving(self, x):
            assert {array.dtype for array in ((*x[0], x[1]) if isinstance(x, tuple) else (x,))} == {self.dtype}
            return x

    model.ranks = Watching()
    model.hidden_states(mx.zeros((1, 3), mx.int32))  # not evaluated


def test_the_rank_with_the_most_bytes_has_as_few_as_can_be():
    sizes = {"embed": 30, "head": 20, **{f"layers.{i}": 10 for i in range(10)}}
    assert stage_sizes(sizes, stages(sizes, 10, 2)) in ([80, 70], [70, 80])
    assert sorted(stage_sizes(sizes, stages(sizes, 10, 3))) == [40, 50, 60]
    assert stages({"embed": 90, **sizes}, 10, 3) == (0, 1, 5, 10) or stages({**sizes, "embed": 90}, 10, 3) == (
        0,
        1,
        6,
        10,
    )
    with pytest.raises(Uneven, match="10 layers are too few for 11 ranks"):
        stages(sizes, 10, 11)
