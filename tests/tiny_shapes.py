"""The shapes of ``bench --shape``, small enough for a test."""

from __future__ import annotations

from mlx_linattn.bench.shapes import SHAPES

SMALL = {
    "vocab_size": 320, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "intermediate_size": 256,
}  # fmt: skip
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
KIMI = {
    "vocab_size": 320, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "num_experts": 8,
    "num_experts_per_token": 2, "moe_intermediate_size": 64,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 2, "head_dim": 64, "short_conv_kernel_size": 4
    },
}  # fmt: skip
TINY = {
    "dense, tied": SHAPES["qwen3.5-0.8b"] | SMALL,
    "mixture": SHAPES["qwen3.5-35b-a3b"] | SMALL | EXPERTS,
    "kimi": SHAPES["kimi-linear"] | KIMI,
}
