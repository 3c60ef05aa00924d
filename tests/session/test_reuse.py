"""The table of tests/bench/reuse.py, as promises; and which checkpoints are kept where room is scarce."""

import importlib.util
from pathlib import Path

import pytest

from mlx_linattn import budget
from mlx_linattn.loading import load_model

LEAST = {"next turn": 902, "thinking stripped": 500, "edit in the question": 350, "end of system changed": 180,
         "half the answer kept": 690}  # fmt: skip


@pytest.fixture
def bench():
    file = Path(__file__).parents[1] / "bench" / "reuse.py"
    spec = importlib.util.spec_from_file_location("bench_reuse", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def model(fixture_folder):
    return load_model(fixture_folder("qwen3_5"), dtype="float32")[0]


def test_common_changes_reuse_what_they_should(bench, model):
    rows = {what: reused for what, reused, _, _ in bench.rows(model)}
    assert rows.keys() == LEAST.keys()
    assert all(rows[what] >= least for what, least in LEAST.items()), rows


def test_scarce_checkpoints_lie_at_messages_and_near_the_end(bench, model):
    plain = [8 + i % 70 for i in range(399)] + [bench.END]
    one = budget.fixed_nbytes(model, model.make_cache())
    chat = bench.session(model, plain, checkpoint_bytes=6 * one)
    assert chat.checkpoint_nbytes <= 6 * one
    assert {200, 500, 902} <= set(chat.checkpoints), chat.checkpoints
    assert max(chat.checkpoints) == 902 and len(chat.checkpoints) == 6
    for _ in range(3):
        chat.send(bench.words(30, 4), max_tokens=20)
    assert chat.checkpoints[0] == 200, "the end of the system prompt is where new conversations start"
    assert len(chat.tokens) in chat.checkpoints
    chat.clear()
    chat.send(bench.words(10, 5), max_tokens=2)
    assert chat.last.reused_tokens == 200


def test_without_room_for_checkpoints_turns_still_work(bench, model):
    chat = bench.session(model, [8] * 399 + [bench.END], checkpoint_bytes=0)
    assert chat.checkpoints == []
    chat.retry(max_tokens=1)
    assert (chat.last.reused_tokens, chat.last.prefilled_tokens) == (0, 502)
