"""The fields of published config.json files that a model's shape follows from."""

from __future__ import annotations


def qwen(layers, key_heads, value_heads, kv_heads, hidden, heads, model_type="qwen3_5", **more):
    experts = {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
    sizes = {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "hidden_size": hidden,
        "intermediate_size": 3584,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "shared_expert_intermediate_size": 512,
    }
    return sizes | (experts if model_type != "qwen3_5" else {}) | more


def kimi():
    full = [4, 8, 12, 16, 20, 24, 27]
    return {
        "model_type": "kimi_linear",
        "hidden_size": 2304,
        "num_hidden_layers": 27,
        "linear_attn_config": {
            "kda_layers": [i for i in range(1, 28) if i not in full],
            "full_attn_layers": full,
            "num_heads": 32,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
        "num_attention_heads": 32,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_shared_experts": 1,
        "moe_intermediate_size": 1024,
        "intermediate_size": 9216,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.446,
        "vocab_size": 163840,
        "model_max_length": 1048576,
    }


def kimi_k3():
    full = [*range(4, 93, 4), 93]
    text = kimi() | {
        "hidden_size": 7168,
        "num_hidden_layers": 93,
        "linear_attn_config": {
            "kda_layers": [i for i in range(1, 94) if i not in full],
            "full_attn_layers": full,
            "num_heads": 96,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
        },
        "num_attention_heads": 96,
        "q_lora_rank": 1536,
        "mla_use_output_gate": True,
        "attn_res_block_size": 12,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "num_shared_experts": 2,
        "moe_intermediate_size": 3072,
        "routed_expert_hidden_size": 3584,
        "latent_moe_use_norm": True,
        "intermediate_size": 33792,
        "routed_scaling_factor": 1.0,
    }
    return {"model_type": "kimi_k3", "text_config": text | {"model_type": "kimi_linear"}}


def ling3():
    return {
        "model_type": "bailing_hybrid",
        "architectures": ["BailingMoeV3ForCausalLM"],
        "hidden_size": 2560,
        "num_hidden_layers": 42,
        "layer_group_size": 6,
        "num_attention_heads": 32,
        "head_dim": 128,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_experts": 512,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "moe_intermediate_size": 768,
        "intermediate_size": 6144,
        "first_k_dense_replace": 2,
        "routed_scaling_factor": 2.5,
        "expert_swiglu_limit_list": [0] * 35 + [4] * 7,
        "vocab_size": 157184,
    }


def olmo():
    return {
        "model_type": "olmo_hybrid",
        "hidden_size": 3840,
        "num_hidden_layers": 32,
        "num_attention_heads": 30,
        "linear_key_head_dim": 96,
        "linear_value_head_dim": 192,
        "intermediate_size": 11008,
        "vocab_size": 100352,
        "rope_parameters": {"rope_theta": None},
    }


def minimax():
    return {
        "model_type": "minimax_text_01",
        "hidden_size": 6144,
        "num_hidden_layers": 80,
        "attn_type_list": ([0] * 7 + [1]) * 10,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rotary_dim": 64,
        "rope_theta": 1e7,
        "intermediate_size": 9216,
        "num_local_experts": 32,
        "num_experts_per_tok": 2,
        "vocab_size": 200064,
        "postnorm": True,
        "shared_intermediate_size": 0,
        "max_position_embeddings": 10240000,
        **{f"layernorm_{part}_alpha": 3.5565588200778455 for part in ("full_attention", "linear_attention", "mlp")},
        **{f"layernorm_{part}_beta": 1.0 for part in ("full_attention", "linear_attention", "mlp")},
    }


def ring_mini():
    return {
        "model_type": "bailing_moe_linear",
        "architectures": ["BailingMoeLinearV2ForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 20,
        "layer_group_size": 5,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "partial_rotary_factor": 0.5,
        "rope_theta": 1e6,
        "group_norm_size": 4,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "moe_intermediate_size": 512,
        "intermediate_size": 5120,
        "first_k_dense_replace": 1,
        "num_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
        "rms_norm_eps": 1e-6,
        "vocab_size": 157184,
        "max_position_embeddings": 131072,
    }


def ling26():
    latent = {key: value for key, value in ling3().items() if "lora" in key or "head_dim" in key}
    return latent | {
        "model_type": "bailing_hybrid",
        "architectures": ["BailingMoeV2_5ForCausalLM"],
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "layer_group_size": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "q_lora_rank": 1536,
        "group_norm_size": 8,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "moe_intermediate_size": 1024,
        "intermediate_size": 9216,
        "first_k_dense_replace": 1,
        "num_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "rope_theta": 6e6,
        "use_qk_norm": True,
        "rms_norm_eps": 1e-6,
        "vocab_size": 157184,
        "max_position_embeddings": 131072,
    }


def recurrent_gemma():
    return {
        "model_type": "recurrent_gemma",
        "hidden_size": 2560,
        "lru_width": 2560,
        "num_hidden_layers": 26,
        "block_types": ["recurrent", "recurrent", "attention"],
        "num_attention_heads": 10,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "attention_window_size": 2048,
        "conv1d_width": 4,
        "intermediate_size": 15360,
        "vocab_size": 256000,
        "partial_rotary_factor": 0.5,
        "logits_soft_cap": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
    }


def jamba(layers, hidden, period, offset, heads, kv_heads, rank, experts):
    return {
        "model_type": "jamba",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "attn_layer_period": period,
        "attn_layer_offset": offset,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": 8192,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_dt_rank": rank,
        "vocab_size": 65536,
        "tie_word_embeddings": experts == 1,
        "max_position_embeddings": 262144,
    }


def fla(model_type, layers, heads, **more):
    """1.3B models of flash-linear-attention."""
    sizes = {"hidden_size": 2048, "num_hidden_layers": layers, "num_heads": heads, "vocab_size": 32000}
    return {"model_type": model_type, **sizes, "intermediate_size": None, **more}
