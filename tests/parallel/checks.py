"""What each rank of a test runs: a few models one after the other, and on the first rank their logits against the references."""

from __future__ import annotations

import sys
from pathlib import Path

import mlx.core as mx
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers import assert_close, golden, tolerance

from mlx_linattn import load_model, parallel


def check(folder: Path, group: parallel.Group) -> None:
    want, within = golden(folder.name), tolerance(folder.name)
    try:
        model, _ = load_model(folder, group=group, dtype="float32")
    except SystemExit as left:  # every other rank, when the first is done with this model
        assert left.code == 0
        return
    cache = model.make_cache()
    assert_close(model(want["input_ids"], cache), want["logits_prefill"], within, "prefill")
    before = cache.snapshot()
    steps = [model(want["decode_ids"][:, i : i + 1], cache) for i in range(3)]
    assert_close(mx.concatenate(steps, axis=1), want["logits_decode"][:, :3], within, "decode")
    twin = cache.fork()
    cache.restore(before)
    again = [model(want["decode_ids"][:, i : i + 1], cache) for i in range(2)]
    assert_close(mx.concatenate(again, axis=1), want["logits_decode"][:, :2], within, "decode after undo")
    rows = twin.take([0]).join(cache.take([0]))  # of different lengths, on their way together
    step = model(np.concatenate([want["decode_ids"][:1, i : i + 1] for i in (3, 2)]), rows)
    assert_close(step[0], want["logits_decode"][0, 3:4], within, "decode of a fork")
    assert_close(step[1], want["logits_decode"][0, 2:3], within, "decode of a row that joined")
    assert rows.take([1]).counts == (cache.offset + 1,)
    batch = model(np.repeat(want["input_ids"][:1, :9], 2, axis=0), lengths=[9, 5])
    assert_close(batch[0], want["logits_prefill"][0, :9], within, "the long row of a batch")
    assert_close(batch[1, :5], want["logits_prefill"][0, :5], within, "the short row of a batch")
    tail = want["long_logits_tail"]
    assert_close(model(want["long_input_ids"])[:, -tail.shape[1] :], tail, within, "a prompt longer than a packet")
    parallel.end(model, group)
    print(f"{folder.name}: same", flush=True)


group = parallel.start("tensor")
for path in sys.argv[1:]:
    check(Path(path), group)
