"""Tiny checkpoints and the comparisons that every model family must pass."""

from __future__ import annotations

import gc
import json
import shutil
import sys
from importlib import resources
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

FIXTURES = Path(__file__).parent / "fixtures"
MLX_LM = tuple(int(part) for part in version("mlx-lm").split(".")[:2])
sys.path.insert(0, str(FIXTURES))

from mlx.utils import tree_flatten, tree_unflatten  # noqa: E402
from seeded_fixtures import load_golden, materialize, read_safetensors  # noqa: E402

from mlx_linattn.state import RecurrentState  # noqa: E402
from mlx_linattn.weights import float32_parameters  # noqa: E402

__all__ = [
    "FIXTURES",
    "assert_close",
    "check_golden",
    "check_precision",
    "endless_demo",
    "folder_bytes",
    "golden",
    "held",
    "largest_difference",
    "materialize",
    "model_bytes",
    "needs_mlx_lm",
    "stock_load",
    "stored",
    "tolerance",
]


def held() -> int:
    """Bytes of all arrays that somebody holds; what was under way has ended."""
    mx.synchronize()
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()


def golden(name: str) -> dict[str, np.ndarray]:
    return load_golden(FIXTURES / name)


def tolerance(name: str) -> float:
    """The absolute logit difference that counts as equal in float32."""
    return json.loads((FIXTURES / "index.json").read_text())[name]["tolerance"]


def largest_difference(got, expected) -> float:
    got, expected = np.array(got, np.float64), np.array(expected, np.float64)
    assert got.shape == expected.shape, f"shape {got.shape}, expected {expected.shape}"
    assert np.isfinite(got).all(), "not finite"
    return float(np.abs(got - expected).max(initial=0.0))


def assert_close(got, expected, within: float, what: str = "") -> None:
    difference = largest_difference(got, expected)
    assert difference <= within, f"{what}: off by {difference:.2e}, allowed {within:.0e}"


def check_golden(model, name: str) -> None:
    """Prefill, decoding, prefill in pieces, a long prompt and a left-padded batch against the reference's logits."""
    want, within = golden(name), tolerance(name)
    ids, T = want["input_ids"], want["input_ids"].shape[1]

    cache = model.make_cache()
    assert_close(model(ids, cache), want["logits_prefill"], within, "prefill")
    assert cache.counts == (T,)
    steps = [model(want["decode_ids"][:, i : i + 1], cache) for i in range(want["decode_ids"].shape[1])]
    assert_close(mx.concatenate(steps, axis=1), want["logits_decode"], within, "decode")

    for cut in (int(want["chunk_split"]), 1, 2, 8, T - 1):
        cache = model.make_cache()
        pieces = [model(ids[:, :cut], cache), model(ids[:, cut:], cache)]
        assert_close(mx.concatenate(pieces, axis=1), want["logits_chunked"], within, f"prefill cut at {cut}")

    tail = want["long_logits_tail"]
    assert_close(model(want["long_input_ids"])[:, -tail.shape[1] :], tail, within, "long prompt")

    real = want["pad_mask"].astype(bool)
    logits = model(want["pad_input_ids"], left_padding=(~real).sum(1).tolist())
    assert_close(np.array(logits)[real], want["pad_logits"][real], within, "left-padded batch")
    check_padding(model, want, within)


def check_precision(half, single) -> None:
    """A bfloat16 model beside the same one in float32 (its weights are overwritten with the half's), over 4,096 tokens.

    What is pinned is float32, so are matrix states, and rounding errors do not grow with the context.
    """
    pinned = float32_parameters(half)
    for name, array in tree_flatten(half.parameters()):
        assert array.dtype == (mx.float32 if name in pinned else mx.bfloat16), f"{name} is {array.dtype}"
    widened = [(name, array.astype(mx.float32)) for name, array in tree_flatten(half.parameters())]
    single.update(tree_unflatten(widened))

    T, part = 4096, 256
    ids = np.random.default_rng(0).integers(0, half.spec.vocab_size, (1, T))
    errors, caches = [], [model.make_cache() for model in (half, single)]
    for first in range(0, T, part):
        rounded, exact = (model(ids[:, first : first + part], cache) for model, cache in zip((half, single), caches))
        assert rounded.dtype == mx.bfloat16
        mx.eval(rounded, exact, caches[0].arrays, caches[1].arrays)
        difference = np.array(rounded.astype(mx.float32)) - np.array(exact)
        errors.append(float(np.sqrt((difference**2).mean()) / np.array(exact).std()))
    for layer in caches[0]:
        if type(layer) is RecurrentState:
            assert layer.arrays[-1].dtype == mx.float32, "the matrix state is not float32"
    early, late = np.mean(errors[:4]), np.mean(errors[-4:])
    assert late < 0.1 and late < 1.5 * early, f"errors grow from {early:.3f} to {late:.3f} of the logits' spread"


def check_padding(model, want, within: float) -> None:
    """Rows of different lengths, read in two calls and then decoded, are each what they are alone."""
    ids = np.concatenate([want["long_input_ids"][:, :40], want["long_input_ids"][:, 50:90]])
    first, second = [20, 9], [7, 16]
    batch, T = model.make_cache(), max(first)
    padded = np.stack([np.pad(ids[r, : first[r]], (0, T - first[r])) for r in (0, 1)])
    model(padded, batch, lengths=first)
    T = max(second)
    padded = np.stack([np.pad(ids[r, first[r] : first[r] + second[r]], (0, T - second[r])) for r in (0, 1)])
    model(padded, batch, lengths=second)
    ends = [first[r] + second[r] for r in (0, 1)]
    assert batch.counts == tuple(ends)
    step = model(np.stack([ids[r, ends[r] : ends[r] + 1] for r in (0, 1)]), batch)
    for r in (0, 1):
        alone = model(ids[r : r + 1, : ends[r] + 1])[:, -1]
        assert_close(step[r], alone, within, f"row {r} of a ragged batch")


def stored(folder: Path, file: str = "model.safetensors") -> dict[str, tuple[str, np.ndarray]]:
    """Name -> (dtype, numbers as stored) of one safetensors file."""
    return read_safetensors(Path(folder) / file)


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, for comparing folders byte by byte."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def model_bytes(folder: Path) -> dict[str, bytes]:
    """As folder_bytes, without what tells how a conversion was called."""
    return {
        name: data for name, data in folder_bytes(folder).items() if name not in ("README.md", "conversion_report.json")
    }


def stock_load(folder: Path, trust: bool = True):
    """The model and config that stock mlx_lm makes of a folder.

    Skips the test with mlx_lm 0.31, the newest for Python 3.10: it knows fewer types and computes some otherwise.
    """
    from mlx_linattn.interop.door import mlx_lm

    if MLX_LM < (0, 32):
        pytest.skip("equality with stock mlx_lm is held against 0.32 and newer")
    return mlx_lm("utils").load_model(Path(folder), trust_remote_code=trust)


def needs_mlx_lm(major: int, minor: int):
    """A mark: what mlx_lm, or the transformers that comes with it, does right only since this release."""
    return pytest.mark.skipif((major, minor) > MLX_LM, reason=f"needs mlx_lm {major}.{minor}")


def endless_demo(folder: Path) -> Path:
    """The demo with another end token, which it never says: its answers go on until something stops them."""
    shutil.copytree(resources.files("mlx_linattn") / "data" / "demo", folder)
    for name, key, value in (
        ("generation_config.json", "eos_token_id", 3067),
        ("tokenizer_config.json", "eos_token", "<|endoftext|>"),
    ):
        config = json.loads((folder / name).read_text(encoding="utf-8"))
        (folder / name).write_text(json.dumps({**config, key: value}), encoding="utf-8")
    return folder
