"""Prompt caches of stock mlx_lm: where the layouts agree they go on exactly, elsewhere they are refused."""

import mlx.core as mx
import pytest
from helpers import FIXTURES, assert_close
from stock import convert, stock_model

from mlx_linattn.errors import SessionFileError
from mlx_linattn.interop.door import mlx_lm
from mlx_linattn.interop.prompt_cache import load_prompt_cache
from mlx_linattn.loading import load_model

IDS = [8 + (i * i) % 70 for i in range(40)]


def saved(folder, path):
    """A stock model's cache of IDS in a file; returns its logits for the next token."""
    cache = mlx_lm("models.cache")
    model = stock_model(folder)
    held = cache.make_prompt_cache(model)
    mx.eval(model(mx.array([IDS]), cache=held))
    cache.save_prompt_cache(str(path), held)
    return model(mx.array([[9]]), cache=held)[:, -1]


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
def test_a_stock_cache_goes_on_here(name, fixture_folder, tmp_path):
    folder = convert(fixture_folder(name), tmp_path / "mlx")
    want = saved(folder, tmp_path / "cache.safetensors")
    model, _ = load_model(folder, dtype="float32")
    state = load_prompt_cache(tmp_path / "cache.safetensors", model)
    assert state.counts == (len(IDS),)
    assert_close(model(mx.array([[9]]), state)[:, -1].astype(mx.float32), want.astype(mx.float32), 2e-2)
    mine = model.make_cache()
    model(mx.array([IDS]), mine)
    for ours, theirs in zip(mine.arrays, load_prompt_cache(tmp_path / "cache.safetensors", model).arrays):
        ours = ours[:, :, : theirs.shape[2]] if ours.ndim == 4 and ours.shape != theirs.shape else ours
        assert_close(ours.astype(mx.float32), theirs.astype(mx.float32), 2e-2)


def test_other_layouts_and_other_files_are_refused(fixture_folder, tmp_path):
    folder = convert(fixture_folder("qwen3_5"), tmp_path / "mlx")
    path = tmp_path / "cache.safetensors"
    saved(folder, path)
    with pytest.raises(SessionFileError, match=r"layers|another model"):
        load_prompt_cache(path, load_model("demo")[0])
    with pytest.raises(SessionFileError, match="not a prompt cache"):
        load_prompt_cache(folder / "model.safetensors", load_model(folder)[0])
    if (FIXTURES / "kimi_linear").exists():
        kimi = convert(fixture_folder("kimi_linear"), tmp_path / "kimi")
        saved(kimi, path)
        with pytest.raises(SessionFileError, match="another layout"):
            load_prompt_cache(path, load_model(kimi)[0])
