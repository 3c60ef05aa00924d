"""The Qwen3.5 text architecture with its multi-token-prediction head, for training.

Parameter names and arithmetic are those of transformers' Qwen3_5ForCausalLM; on top of it the full-attention layers can
be restricted to a sliding window with attention sinks, so that what lies further back must pass through the
gated-delta state.
"""

import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from functions import FUSED
from mixing import full_attention, gated_delta, window_attention
from safetensors.torch import load_file
from torch import nn

CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 3072,
    "hidden_size": 192,
    "intermediate_size": 448,
    "num_hidden_layers": 8,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2,
    "full_attention_interval": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "attn_output_gate": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [3, 3, 2],
    },
    "tie_word_embeddings": True,
    "use_cache": True,
    "bos_token_id": None,
    "eos_token_id": 3069,
    "pad_token_id": 3067,
    "dtype": "bfloat16",
}


def weight(*shape, std=0.02):
    return nn.Parameter(torch.randn(*shape) * std)


class W(nn.Module):
    """A named weight, so that the state dict has the published names."""

    def __init__(self, *shape, std=0.02, fill=None):
        super().__init__()
        self.weight = nn.Parameter(torch.full(shape, float(fill))) if fill is not None else weight(*shape, std=std)


class Bag(nn.Module):
    def __init__(self, **kw):
        super().__init__()
        for k, v in kw.items():
            setattr(self, k, v)


class Layer(nn.Module):
    def __init__(self, c, kind):
        super().__init__()
        d, f = c["hidden_size"], c["intermediate_size"]
        depth = (2 * c["num_hidden_layers"]) ** -0.5
        std = d**-0.5 * 0.7
        self.kind, self.c = kind, c
        self.input_layernorm, self.post_attention_layernorm = W(d, fill=0), W(d, fill=0)
        self.mlp = Bag(gate_proj=W(f, d, std=std), up_proj=W(f, d, std=std), down_proj=W(d, f, std=f**-0.5 * depth))
        if kind == "linear_attention":
            nk, nv = (
                c["linear_num_key_heads"] * c["linear_key_head_dim"],
                c["linear_num_value_heads"] * c["linear_value_head_dim"],
            )
            nh = c["linear_num_value_heads"]
            la = Bag(
                in_proj_qkv=W(2 * nk + nv, d, std=std),
                in_proj_z=W(nv, d, std=std),
                in_proj_b=W(nh, d, std=std),
                in_proj_a=W(nh, d, std=std),
                conv1d=W(2 * nk + nv, 1, c["linear_conv_kernel_dim"], std=0.3),
                norm=W(c["linear_value_head_dim"], fill=1),
                out_proj=W(d, nv, std=nv**-0.5 * depth),
            )
            # memory spans of the heads at the start: from a few tokens to a hundred thousand
            la.A_log = nn.Parameter(torch.empty(nh).uniform_(1, 4).log())
            dt = torch.exp(torch.linspace(math.log(1e-5), math.log(0.1), nh))
            la.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
            self.linear_attn = la
        else:
            h, kv, hd = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
            self.self_attn = Bag(
                q_proj=W(2 * h * hd, d, std=std),
                k_proj=W(kv * hd, d, std=std),
                v_proj=W(kv * hd, d, std=std),
                o_proj=W(d, h * hd, std=(h * hd) ** -0.5 * depth),
                q_norm=W(hd, fill=0),
                k_norm=W(hd, fill=0),
            )

    def forward(self, x, shape, place, cos, sin, window=None, sinks=0):
        """x: [tokens, hidden], the rows of a batch of shape `shape` one after the other."""
        m, (b, t) = self.mlp, shape
        tail = (self.post_attention_layernorm.weight, m.gate_proj.weight, m.up_proj.weight, m.down_proj.weight)
        if self.kind == "linear_attention":
            a, c = self.linear_attn, self.c
            qkv, z, beta, g = FUSED["linear_pre"](
                x,
                place,
                self.input_layernorm.weight,
                a.in_proj_qkv.weight,
                a.in_proj_z.weight,
                a.in_proj_b.weight,
                a.in_proj_a.weight,
                a.conv1d.weight,
                a.dt_bias,
                a.A_log,
            )
            dk, dv = c["linear_key_head_dim"], c["linear_value_head_dim"]
            nk, nv = c["linear_num_key_heads"] * dk, c["linear_num_value_heads"] * dv
            q, k, v = qkv.split([nk, nk, nv], -1)
            o, _ = gated_delta(
                q.reshape(b, t, -1, dk),
                k.reshape(b, t, -1, dk),
                v.reshape(b, t, -1, dv),
                g.view(b, t, -1),
                beta.view(b, t, -1),
            )
            return FUSED["linear_post"](x, o.reshape(b * t, -1, dv), z, a.norm.weight, a.out_proj.weight, *tail)
        a = self.self_attn
        q, k, v, gate = FUSED["attn_pre"](
            x,
            self.input_layernorm.weight,
            a.q_proj.weight,
            a.k_proj.weight,
            a.v_proj.weight,
            a.q_norm.weight,
            a.k_norm.weight,
            cos,
            sin,
        )
        q, k, v = (y.view(b, t, *y.shape[1:]) for y in (q, k, v))
        o = full_attention(q, k, v) if window is None else window_attention(q, k, v, window, sinks)
        return FUSED["attn_post"](x, o.reshape(b * t, -1), gate, a.o_proj.weight, *tail)


class Model(nn.Module):
    def __init__(self, c=CONFIG):
        super().__init__()
        self.c = c
        d = c["hidden_size"]
        self.model = Bag(
            embed_tokens=W(c["vocab_size"], d, std=0.02),
            norm=W(d, fill=0),
            layers=nn.ModuleList([Layer(c, k) for k in c["layer_types"]]),
        )
        self.mtp = Bag(
            pre_fc_norm_embedding=W(d, fill=0),
            pre_fc_norm_hidden=W(d, fill=0),
            fc=W(d, 2 * d, std=(2 * d) ** -0.5),
            layers=nn.ModuleList([Layer(c, "full_attention")]),
            norm=W(d, fill=0),
        )

    def rope(self, positions):
        p = self.c["rope_parameters"]
        n = int(self.c["head_dim"] * p["partial_rotary_factor"])
        inv = 1.0 / (p["rope_theta"] ** (torch.arange(0, n, 2, device=positions.device).float() / n))
        f = positions[..., None].float() * inv
        f = torch.cat([f, f], -1)
        return f.cos(), f.sin()

    def places(self, ids, positions):
        b, t = ids.shape
        place = torch.arange(t, device=ids.device)
        if positions is None:
            positions = place[None]
        cos, sin = self.rope(positions.expand(b, t).reshape(-1))
        return place.repeat(b), cos, sin

    def trunk(self, ids, positions=None, window=None, sinks=0):
        """Hidden states after the final norm, shape [tokens, hidden]."""
        place, cos, sin = self.places(ids, positions)
        x = F.embedding(ids.reshape(-1), self.model.embed_tokens.weight)
        for layer in self.model.layers:
            x = layer(x, ids.shape, place, cos, sin, window, sinks)
        return FUSED["final_norm"](x, self.model.norm.weight)

    def draft(self, hidden, next_ids, positions=None, window=None, sinks=0):
        """The MTP head: from h_t (after the final norm) and token t+1, the hidden state that predicts token t+2."""
        place, cos, sin = self.places(next_ids, positions)
        m = self.mtp
        e = F.embedding(next_ids.reshape(-1), self.model.embed_tokens.weight.detach())
        x = FUSED["mtp_in"](e, hidden, m.pre_fc_norm_embedding.weight, m.pre_fc_norm_hidden.weight, m.fc.weight)
        return FUSED["final_norm"](m.layers[0](x, next_ids.shape, place, cos, sin, window, sinks), m.norm.weight)

    def logits(self, h):
        return F.linear(h, self.model.embed_tokens.weight)


def tensors_to_save(model):
    """bf16, except what the recurrence's decay is computed from."""
    return {
        k: v.detach()
        .to("cpu", torch.float32 if k.endswith(("A_log", "linear_attn.norm.weight")) else torch.bfloat16)
        .contiguous()
        .clone()
        for k, v in model.state_dict().items()
    }


def load(path, device="cpu", dtype=torch.float32):
    path = Path(path)
    model = Model(json.loads((path / "config.json").read_text()))
    weights = load_file(path / "model.safetensors")
    model.load_state_dict({k: v.to(dtype) for k, v in weights.items()})
    return model.to(device).eval()
