"""Ranks that are processes, over MLX's ring."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers import FIXTURES, materialize

sys.path.insert(0, str(Path(__file__).parent))

from processes import results, start_ranks

HERE = Path(__file__).parent
# Between them every mixer, and every sum and norm that goes over all ranks.
MODELS = {
    2: ("bailing_hybrid_v25", "fla_hgrn2", "jamba", "kimi_k3", "minimax_text_01", "olmo_hybrid", "qwen3_next", "recurrent_gemma"),
    4: ("fla_gated_deltanet_hybrid",),
}  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 4])
def test_logits_are_those_of_one_process(tmp_path, ranks):
    folders = [str(materialize(FIXTURES / name, tmp_path / name)) for name in MODELS[ranks]]
    found = results(start_ranks(tmp_path, ranks, [str(HERE / "checks.py"), *folders]))
    assert [status for status, _, _ in found] == [0] * ranks, "\n".join(err for _, _, err in found)
    assert found[0][1].split("\n")[:-1] == [f"{name}: same" for name in MODELS[ranks]]
