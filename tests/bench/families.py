"""Model families against stock mlx_lm: the same random weights, the same process, in turn. One function a family.

    python tests/bench/families.py              all of them
    python tests/bench/families.py jamba ring   these

recurrence  the operation alone at a real width, from its inputs to its outputs and new state, over 2048 tokens
prefill     the whole model, a small one, over 2048 tokens
per token   time of a token among 16384 over that among 1024; 1 is linear. Of the recurrence, and of the whole model in pieces
            of 1024, whose attention layers have more to read the longer the prompt is
held        bytes really held after prefill over the bytes that the cache reports; 1 is the truth
Times are the best of several runs; ratios above 1 mean that mlx_linattn is faster.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from mlx_linattn import load_model, ops
from mlx_linattn.interop.door import mlx_lm

T = 2048


def jamba() -> None:
    config = {
        "model_type": "jamba", "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 1, "attn_layer_offset": 2, "attn_layer_period": 4,
        "expert_layer_offset": 1, "expert_layer_period": 2, "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_expand": 2,
        "mamba_dt_rank": 8, "num_experts": 1, "num_experts_per_tok": 1, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768, "tie_word_embeddings": True, "dtype": "float32",
    }  # fmt: skip
    ours, theirs = both(config, "models.jamba")
    inner, N, rank = 256, 16, 32  # mlx_lm copies [T, inner, N] for every token: at a real width, hours
    wide = {**config, "hidden_size": inner // 2, "mamba_dt_rank": rank}
    module = mlx_lm("models.jamba")
    stock = module.JambaMambaMixer(module.ModelArgs.from_dict(wide))
    A_log, ones = stock.A_log, mx.ones((N,))

    def recurrence(dtype, T=T):
        x, steps, dt = (random(1, T, size).astype(dtype) for size in (inner, rank + 2 * N, inner))
        mx.eval(x, steps, dt)
        stock.set_dtype(dtype)
        stock.x_proj, stock.dt_proj = (lambda _: steps), (lambda _: dt)  # the matrices are not what is measured

        def step():
            B, C = (ops.rms_norm(y, ones, 1e-6) for y in (steps[..., rank : rank + N], steps[..., rank + N :]))
            delta = mx.logaddexp(dt.astype(mx.float32), 0.0)
            return ops.selective_scan(x, delta, -mx.exp(A_log), B, C, stock.D)

        return step, lambda: stock.ssm_step(x, -mx.exp(stock.A_log))

    report("Jamba", ours, theirs, recurrence, their_runs=0)


def recurrent_gemma() -> None:
    config = {
        "model_type": "recurrent_gemma", "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 512,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32,
        "attention_window_size": 512, "attention_bias": False, "conv1d_width": 4, "logits_soft_cap": 30.0,
        "rms_norm_eps": 1e-5, "rope_theta": 1e4, "partial_rotary_factor": 0.5, "lru_width": 128,
        "block_types": ["recurrent", "recurrent", "attention"], "dtype": "float32",
    }  # fmt: skip
    ours, theirs = both(config, "models.recurrent_gemma")
    width = 1024
    scan = mlx_lm("models.recurrent_gemma").rnn_scan

    def recurrence(dtype, T=T):
        decay, update = mx.sigmoid(random(1, T, width)).astype(dtype), random(1, T, width).astype(dtype)
        wide = [x.astype(mx.float32) for x in (decay, update)]  # as the layer gives them to it
        mx.eval(decay, update, wide)

        def step():
            h, state = ops.diagonal_scan(*wide)
            return h.astype(dtype), state

        return step, lambda: scan(update, decay, mx.zeros((1, width), dtype))

    report("RecurrentGemma", ours, theirs, recurrence)


def ring() -> None:
    config = {
        "model_type": "bailing_moe_linear", "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256,
        "moe_intermediate_size": 64, "num_experts": 4, "num_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32, "num_experts_per_tok": 2,
        "num_hidden_layers": 4, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "partial_rotary_factor": 0.5,
        "first_k_dense_replace": 1, "layer_group_size": 4, "group_norm_size": 4, "use_qk_norm": True,
        "score_function": "sigmoid", "moe_router_enable_expert_bias": True, "routed_scaling_factor": 2.5, "n_group": 2,
        "topk_group": 1, "max_position_embeddings": 32768, "tie_word_embeddings": False, "dtype": "float32",
    }  # fmt: skip
    ours, theirs = both(config, "models.bailing_moe_linear")
    decay = ours.layers[0].mixer._decay
    recurrent = mlx_lm("models.bailing_moe_linear").recurrent_gla

    def recurrence(dtype, T=T):
        q, k, v = (random(1, T, 4, 128).astype(dtype) for _ in range(3))
        by_head = [x.swapaxes(1, 2) for x in (q, k, v)]
        mx.eval(q, k, v, by_head)
        theirs = lambda: recurrent(*by_head, g=mx.log(decay), scale=1.0, h=None)  # noqa: E731
        return lambda: ops.recurrence(q, k, v, decay, delta=False), theirs

    report("Ring-linear", ours, theirs, recurrence)


def kimi() -> None:
    """The recurrence in Kimi-Linear's own shape, 32 heads of 128; the model around it is small."""
    config = {
        "model_type": "kimi_linear", "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 128, "q_lora_rank": None,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32, "mla_use_nope": True, "rope_theta": 1e4,
        "linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 2, "head_dim": 32,
                               "short_conv_kernel_size": 4},
        "num_experts": 8, "num_experts_per_token": 2, "num_shared_experts": 1, "moe_intermediate_size": 64,
        "first_k_dense_replace": 1, "routed_scaling_factor": 2.446, "rms_norm_eps": 1e-5, "model_max_length": 32768,
        "tie_word_embeddings": False, "dtype": "float32",
    }  # fmt: skip
    ours, theirs = both(config, "models.kimi_linear")
    update = mlx_lm("models.gated_delta").gated_delta_update

    def recurrence(dtype, T=T):
        H, D = 32, 128
        q, k, v, f = (random(1, T, H, D).astype(dtype) for _ in range(4))
        b, A_log, dt_bias = random(1, T, H).astype(dtype), random(H), random(H, D)
        q, k = (ops.l2_normalize(x).astype(dtype) for x in (q, k))
        mx.eval(q, k, v, f, b)

        def step():
            return ops.recurrence(q, k, v, ops.delta_decay(f, A_log, dt_bias), ops.write_strength(b), delta=True)

        return step, lambda: update(q, k, v, f, b, A_log[:, None], dt_bias)

    report("Kimi-Linear", ours, theirs, recurrence)


def both(config: dict, module: str):
    """One folder of random weights, written by stock mlx_lm's class, loaded by both libraries."""
    stock = mlx_lm(module)
    mx.random.seed(0)
    model = stock.Model(stock.ModelArgs.from_dict(dict(config)))
    model.update(tree_map(lambda x: x if x.ndim < 2 else 0.05 * mx.random.normal(x.shape), model.parameters()))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        tensors = dict(tree_flatten(model.parameters()))
        if config.get("tie_word_embeddings", True):
            tensors.pop("lm_head.weight", None)
        mx.save_safetensors(f"{folder}/model.safetensors", tensors, metadata={"format": "mlx"})
        return load_model(folder)[0], mlx_lm("utils").load_model(Path(folder))[0]


def random(*shape: int):
    x = mx.random.normal(shape) * 0.3
    mx.eval(x)
    return x


def report(name: str, ours, theirs, recurrence: Callable, their_runs: int = 3) -> None:
    """``recurrence(dtype)`` gives the operation of each library, ready to run."""
    print(f"\n{name}")
    for dtype in (mx.bfloat16, mx.float32):  # most checkpoints are bfloat16
        compare(f"recurrence {str(dtype).removeprefix('mlx.core.')}", *recurrence(dtype), their_runs=their_runs)
    ids = mx.array([[i * 31 % 1000 for i in range(8 * T)]])
    difference = mx.abs(ours(ids[:, :200]) - theirs(ids[:, :200])).max().item()
    print(f"  logits differ by    {difference:.1e}")
    compare("prefill", lambda: prefill(ours, ids[:, :T]), lambda: prefill(theirs, ids[:, :T]), 3, min(their_runs, 1))
    rates = [best(lambda n=n: prefill(ours, ids[:, :n], 1024), runs) / n for n, runs in ((1024, 8), (8 * T, 2))]
    alone = [best(recurrence(mx.float32, n)[0], 5) / n for n in (1024, 8 * T)]
    print(f"  per token           recurrence {alone[1] / alone[0]:.2f}   whole model {rates[1] / rates[0]:.2f}")
    print("  held                " + "".join(f"{label} {held(model, ids[:, :T]):.2f}  " for label, model in
                                     (("mlx_linattn", ours), ("mlx_lm", theirs))))  # fmt: skip


def compare(label: str, ours: Callable, theirs: Callable, our_runs: int = 10, their_runs: int = 3) -> None:
    a, b = best(ours, our_runs), best(theirs, their_runs)
    print(f"  {label:<19} mlx_linattn {a * 1e3:8.1f} ms   mlx_lm {b * 1e3:8.1f} ms   {b / a:6.1f} x")


def best(run: Callable, runs: int) -> float:
    times = []
    for _ in range(runs + 1):  # the first one warms up
        began = time.perf_counter()
        mx.eval(run())
        times.append(time.perf_counter() - began)
    return min(times[1:] or times)


def prefill(model, ids, piece: int = T):
    """The prompt in pieces, as generation reads it; evaluated, so that no graph grows."""
    cache = model.make_cache()
    for start in range(0, ids.shape[1], piece):
        logits = model(ids[:, start : start + piece], cache)
        mx.eval(logits, [part.state for part in cache])
    return logits


def held(model, ids) -> float:
    """Bytes that a cache keeps alive after a prompt, over those it reports."""
    limit = mx.set_cache_limit(0)
    mx.eval(ids)
    gc.collect()
    before = mx.get_active_memory()
    cache = model.make_cache()
    logits = model(ids, cache)
    mx.eval(logits, [part.state for part in cache])
    del logits
    gc.collect()
    share = (mx.get_active_memory() - before) / sum(part.nbytes for part in cache)
    mx.set_cache_limit(limit)
    return share


FAMILIES = {f.__name__: f for f in (jamba, recurrent_gemma, ring, kimi)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="family", help=", ".join(FAMILIES))
    names = parser.parse_args().names or list(FAMILIES)
    unknown = set(names) - FAMILIES.keys()
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(FAMILIES)}")
    print(f"mlx {mx.__version__}, mlx_lm {mlx_lm('_version').__version__}, {mx.default_device()}")
    for name in names:
        FAMILIES[name]()


if __name__ == "__main__":
    main()
