"""The recurrence against others, and whole models against stock mlx_lm; what metal/README.md reports comes from here.

    python tests/bench/kernels.py [--check] [--fla] [--models] [--long]

On a CPU: the plain MLX path against mlx_lm's and mx.fast's. On a GPU: the kernels, mx.fast, and with --fla the Triton
kernels of flash-linear-attention (in a process of its own; NVIDIA only). --check first compares every kernel with float64.
--models times whole models with random weights. tests/bench/step.py and scans.py hold the other kernels.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import mlx.core as mx

sys.path.insert(0, str(Path(__file__).parent.parent))

from mlx_linattn import ops
from mlx_linattn.ops import dispatch, kernels


def milliseconds(step, state, inner=5, repeats=5):
    """Median of ``repeats``. Each call's state goes into the next, so that no two can run side by side."""

    def run():
        s, outputs = state, []
        for _ in range(inner):
            o, s = step(s)
            outputs.append(o)
        mx.eval(s, *outputs)

    run()
    times = []
    for _ in range(repeats):
        mx.synchronize()
        start = time.perf_counter()
        run()
        mx.synchronize()
        times.append((time.perf_counter() - start) / inner * 1e3)
    return statistics.median(times)


def cpu_milliseconds(step, state, repeats=3):
    """Median wall and median processor time of one call; the latter says more on a busy machine."""
    pairs = []
    for _ in range(repeats + 1):
        start, used = time.perf_counter(), time.process_time()
        mx.eval(*step(state))
        pairs.append(((time.perf_counter() - start) * 1e3, (time.process_time() - used) * 1e3))
    return tuple(statistics.median(x) for x in zip(*pairs[1:]))


def inputs(B, T, Hk, Hv, D, dtype, vector):
    def unit(x):
        return x / mx.linalg.norm(x, axis=-1, keepdims=True)

    q, k = (unit(mx.random.normal((B, T, Hk, D))).astype(dtype) for _ in range(2))
    v = mx.random.normal((B, T, Hv, D)).astype(dtype)
    decay = mx.exp(-0.1 * mx.exp(mx.random.normal((B, T, Hv, *([D] if vector else [])))))
    beta, state = mx.sigmoid(mx.random.normal((B, T, Hv))), mx.random.normal((B, Hv, D, D))
    mx.eval(q, k, v, decay, beta, state)
    return (q, k, v, decay, beta), state


def on_cpu(T=2048, H=16, D=128):
    from mlx_lm.models.gated_delta import gated_delta_ops

    print(f"recurrence on the CPU, float32, B=1, T={T}, {H} heads of {D}: wall / processor ms")
    for vector in (False, True):
        given, state = inputs(1, T, H, H, D, mx.float32, vector)
        rows = {
            "mlx_lm gated_delta_ops": lambda s, g=given: gated_delta_ops(*g, s),
            "mx.fast.gated_delta_update": lambda s, g=given: mx.fast.gated_delta_update(*g, initial_state=s),
            "ours": lambda s, g=given: ops.recurrence(*g, s, delta=True),
        }
        times = {name: cpu_milliseconds(step, state) for name, step in rows.items()}
        for name, (wall, used) in times.items():
            faster = "".join(f"{b / a:8.1f}x" for a, b in zip(times["ours"], (wall, used)))
            print(
                f"  {'vector' if vector else 'scalar'} {name:28}{wall:9.0f} / {used:6.0f}   ours is{faster}", flush=True
            )


def prefill(device, long):
    print("prefill, B=1, Hk=16, Hv=32, D=128: ms a call")
    paths = ("packed", "simdgroup", "tensor_core") if device == "cuda" else ("packed", "simdgroup")
    for vector in (False, True):
        for dtype in (mx.bfloat16, mx.float32):
            for T in (1, 16, 64, 128, 512, 4096, 16384):
                given, state = inputs(1, T, 16, 32, 128, dtype, vector)
                row = []
                for path in paths:
                    if path == "packed" and T > 4096:
                        continue
                    with ops.use_backend(device, path):
                        row.append(
                            f"{path} {milliseconds(lambda s, g=given: ops.recurrence(*g, s, delta=True), state):8.3f}"
                        )
                if T in (512, 16384) and dtype == mx.bfloat16 and not vector and (long or T == 512):
                    call = lambda s, g=given: mx.fast.gated_delta_update(*g, initial_state=s)  # noqa: E731
                    row.append(f"mx.fast {milliseconds(call, state, 1, 1):8.1f}")
                name = f"{'vector' if vector else 'scalar'} {str(dtype)[9:]:9}"
                print(f"  {name} T={T:6}  {'  '.join(row)}", flush=True)


def decode(device):
    x = mx.random.normal((1 << 28,))
    mx.eval(x)
    copy = 2 * x.nbytes / milliseconds(lambda s: (mx.zeros(1), s + 1.0), x, 4) / 1e9
    print(f"one token, Hk=16, Hv=32, D=128, bfloat16: copy moves {copy:.2f} TB/s")
    for B in (1, 16, 64, 256):
        given, state = inputs(B, 1, 16, 32, 128, mx.bfloat16, False)
        for lanes in (4, 8, 16):
            with ops.use_backend(device):
                step = partial(_one_token, given, lanes)
                ms = milliseconds(step, state, 200, 3)  # long enough for the host to be ahead of the GPU
            rate = 2 * state.nbytes / ms / 1e9
            print(
                f"  B={B:4} lanes={lanes:2}: {ms * 1e3:8.1f} us  {rate:.2f} TB/s  {rate / copy:4.0%} of copy",
                flush=True,
            )


def _one_token(given, lanes, state):
    return kernels.packed(*given, state, True, None, lanes=lanes)


FLA = """
import torch, torch.nn.functional as F
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.kda import chunk_kda
from triton.testing import do_bench
import fla, triton
print(f"flash-linear-attention {fla.__version__}, triton {triton.__version__}, torch {torch.__version__}; key heads repeated to 32, bfloat16", flush=True)
for T in (4096, 16384):
    of = dict(device="cuda", dtype=torch.bfloat16)
    q, k = (F.normalize(torch.randn(1, T, 32, 128, **of), dim=-1) for _ in range(2))
    v, b, h = torch.randn(1, T, 32, 128, **of), torch.rand(1, T, 32, device="cuda"), torch.zeros(1, 32, 128, 128, device="cuda")
    g, gv = -0.1 * torch.rand(1, T, 32, device="cuda"), -0.1 * torch.rand(1, T, 32, 128, device="cuda")
    with torch.no_grad():
        for name, f in (("chunk_gated_delta_rule", lambda: chunk_gated_delta_rule(q, k, v, g, b, initial_state=h, output_final_state=True)),
                        ("chunk_kda", lambda: chunk_kda(q, k, v, gv, b, initial_state=h, output_final_state=True))):
            f()
            print(f"  {name:24} T={T:6} {do_bench(f, return_mode='median'):8.3f} ms", flush=True)
"""


def check(device):
    from msl.test_recurrence import PROBLEMS

    for name, problem in PROBLEMS.items():
        for path in ("packed", "simdgroup", *(["tensor_core"] if device == "cuda" else [])):
            call = dispatch.Call("recurrence", problem.T, 1, problem.Dk, problem.Dv, problem.gate, problem.delta)
            with ops.use_backend(device, path):
                if dispatch.choose(call).path != path:
                    continue
                worst = problem.differences(problem.run())
            # Operands of 16 bits on tensor cores; everything else is float32 throughout.
            allowed = [w * 20 if path == "tensor_core" else w for w in problem.within]
            verdict = "ok" if all(a <= b for a, b in zip(worst, allowed)) else f"WRONG, allowed {allowed}"
            print(f"  {name:28} {path:12} o {worst[0]:.1e}  state {worst[1]:.1e}  {verdict}", flush=True)


QWEN = {
    "model_type": "qwen3_5_text", "hidden_act": "silu", "full_attention_interval": 4, "head_dim": 256, "vocab_size": 32768,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "rms_norm_eps": 1e-6, "attn_output_gate": True, "tie_word_embeddings": True, "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10], "mrope_interleaved": True},
}  # fmt: skip
#: Layer shapes of Qwen3.5-0.8B and, with fewer layers, of Qwen3.5-9B; the vocabulary is cut, the weights are random.
SIZES = {
    "0.8B": {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2, "linear_num_value_heads": 16},
    "9B / 4": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 4, "linear_num_value_heads": 32},
}  # fmt: skip


def models(device):
    import mlx.utils
    from mlx_lm.models import qwen3_5
    from mlx_lm.utils import load_model as load_stock

    from mlx_linattn.loading import load_model

    on_gpu = device != "cpu"
    print("whole models, random weights, greedy: tokens a second, and ours / mlx_lm")
    for name, size in SIZES.items() if on_gpu else [("0.8B / 4", {**SIZES["0.8B"], "num_hidden_layers": 6})]:
        config = QWEN | size | {"dtype": "bfloat16" if on_gpu else "float32"}
        config["layer_types"] = [
            "full_attention" if i % 4 == 3 else "linear_attention" for i in range(size["num_hidden_layers"])
        ]
        with tempfile.TemporaryDirectory() as folder:
            config = {
                "model_type": "qwen3_5",
                "architectures": ["Qwen3_5ForConditionalGeneration"],
                "text_config": config,
            }
            stock = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(config))
            stock.set_dtype(mx.bfloat16 if on_gpu else mx.float32)
            weights = dict(mlx.utils.tree_flatten(stock.parameters()))
            mx.save_safetensors(f"{folder}/model.safetensors", weights, metadata={"format": "mlx"})
            Path(folder, "config.json").write_text(json.dumps(config))
            stock = load_stock(Path(folder))[0]
            ours = load_model(folder)[0]
            mx.eval(ours.parameters(), stock.parameters())
        for T, B in ((512, 1), (4096, 1), (1, 1), (1, 16)) if on_gpu else ((256, 1), (1, 1)):
            rates = {who: _rate(model, T, B, on_gpu) for who, model in (("mlx_lm", stock), ("ours", ours))}
            what = f"prefill of {T}" if T > 1 else f"decode, B={B}"
            print(
                f"  {name:8} {what:16} mlx_lm {rates['mlx_lm']:10.1f}  ours {rates['ours']:10.1f}  {rates['ours'] / rates['mlx_lm']:6.2f}x",
                flush=True,
            )


def _rate(model, T, B, on_gpu):
    ids = mx.random.randint(0, 32768, (B, T))
    if T > 1:

        def run():
            cache = model.make_cache()
            start = time.perf_counter()
            mx.eval(model(ids, cache)[:, -1])
            return T * B / (time.perf_counter() - start)
    else:
        cache = model.make_cache()
        mx.eval(model(mx.random.randint(0, 32768, (B, 32)), cache))

        def run(steps=32 if on_gpu else 4):
            now = ids
            start = time.perf_counter()
            for _ in range(steps):
                now = model(now, cache)[:, -1:].argmax(-1)
                mx.eval(now)
            return steps * B / (time.perf_counter() - start)

    run()
    return statistics.median(run() for _ in range(3))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option in ("check", "fla", "models", "long"):
        parser.add_argument(f"--{option}", action="store_true")
    given = parser.parse_args()
    device = dispatch.device()
    print(f"mlx {mx.__version__}, {mx.device_info().get('device_name', 'CPU')}, {device}")
    if device == "cpu":
        on_cpu()
    else:
        if given.check:
            check(device)
        prefill(device, given.long)
        decode(device)
    if given.fla:
        subprocess.run([sys.executable, "-c", FLA], check=False)
    if given.models:
        models(device)
