"""How memory and time depend on the context. Run: python tests/bench/memory.py

1. The temporary memory of reading 512 tokens after a context of 1k and of 32k tokens, in a hybrid of Qwen3-Next's make (three
   gated-delta layers, one attention layer with heads of 256 features), and with quantized keys and values. The context's keys and
   values are random numbers put in place: memory depends on their shapes alone.
2. With max_kv_size: memory held, and the time of a token, after 4k and after 64k tokens that were really read.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import mlx.core as mx
from helpers import FIXTURES, materialize

from mlx_linattn.generation import prefill
from mlx_linattn.loading import load_model
from mlx_linattn.model import Model
from mlx_linattn.spec import AttentionSpec, GatedDeltaSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec
from mlx_linattn.state import KVOptions, KVState

CHUNK = 512


def hybrid() -> Model:
    delta = GatedDeltaSpec(key_heads=4, value_heads=8, key_dim=64, value_dim=64, conv_width=4, norm_eps=1e-6)
    attention = AttentionSpec(
        heads=8, kv_heads=2, head_dim=256, rope=RopeSpec(64, 1e7), norm_eps=1e-6, qk_norm=True, output_gate=True
    )
    layers = tuple(LayerSpec(mixer, MlpSpec(512)) for mixer in (delta, delta, delta, attention))
    return Model(ModelSpec("hybrid", 512, 256, layers, 1e-6, True, 1 << 18))


def held() -> int:
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()


def filled(model: Model, tokens: int, options: KVOptions):
    """A state as after ``tokens`` tokens, with room for a chunk more."""
    state = model.make_cache(options)
    state.reserve(tokens + CHUNK)
    mx.eval(model.hidden_states(mx.array([[1]]), state), state.arrays)
    for layer in state:
        if isinstance(layer, KVState):
            for arrays in (layer.exact, *layer.packed):
                for array in arrays:
                    assert array.shape[2] >= tokens + CHUNK
            layer.length = tokens
    state.counts = (tokens,)
    return state


def transient(model: Model, context: int, options: KVOptions) -> int:
    """Bytes at the peak of reading one chunk, over those held before."""
    state = filled(model, context, options)
    ids = mx.zeros((1, CHUNK), mx.int32)
    mx.eval(ids, state.arrays)
    before = held()
    mx.reset_peak_memory()
    mx.eval(model.hidden_states(ids, state), state.arrays)
    return mx.get_peak_memory() - before


def bounded(model: Model, size: int, contexts: tuple[int, ...]) -> list[tuple[int, float]]:
    """For each context, in constant-memory mode: bytes held and seconds a token."""
    token = mx.array([[9]])
    mx.eval(token)
    states, sizes = [], []
    for context in contexts:
        base = held()
        state = model.make_cache(KVOptions(max_kv_size=size))
        while state.offset < context:
            ids = [8 + (state.offset + i) % 70 for i in range(min(1024, context - state.offset))]
            prefill(model, ids, state, 1024)
        sizes.append(held() - base)
        states.append(state)
    times: list[list[float]] = [[] for _ in states]
    for turn in range(400):  # by turns, so that whatever else the machine does meets all of them
        for i in (range(len(states)), reversed(range(len(states))))[turn % 2]:
            began = time.perf_counter()
            mx.eval(model(token, states[i]), states[i].arrays)
            times[i].append(time.perf_counter() - began)
    return [(size, sorted(row)[20]) for size, row in zip(sizes, times)]  # the quick ones: the others were interrupted


def main() -> None:
    model = hybrid()
    mx.eval(model.parameters())
    print(f"temporary memory of {CHUNK} tokens, head_dim 256")
    for name, options in (
        ("as stored", KVOptions()),
        ("8 bits", KVOptions(kv_bits=8)),
        ("4 bits", KVOptions(kv_bits=4)),
        ("max_kv_size 1024", KVOptions(max_kv_size=1024)),
    ):
        near, far = transient(model, 1024, options), transient(model, 32768, options)
        print(
            f"  {name:<18} {near / 1e6:8.1f} MB at 1k {far / 1e6:8.1f} MB at 32k   x {far / near:.3f}  (at most 1.15)"
        )
    with tempfile.TemporaryDirectory() as folder:
        small, _ = load_model(materialize(FIXTURES / "qwen3_5", Path(folder) / "model"), dtype="float32")
        mx.eval(small.parameters())
        (a, t), (b, u) = bounded(small, 256, (4096, 65536))
    print("max_kv_size 256, tokens really read")
    print(f"  held {a / 1e3:8.1f} kB at 4k {b / 1e3:8.1f} kB at 64k   x {b / a:.3f}  (at most 1.01)")
    print(f"  a token {t * 1e3:6.2f} ms at 4k {u * 1e3:8.2f} ms at 64k   x {u / t:.3f}  (at most 1.1)")


if __name__ == "__main__":
    main()
