"""The arithmetic between the mixers, as functions that torch.compile can fuse.

They work on flat tensors [tokens, ...], so that one compiled version serves every row length.
"""

import torch
import torch.nn.functional as F


def rms(x, w, eps=1e-6):
    """Zero-centred RMSNorm: the stored weight is an offset from one."""
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + w)).to(x.dtype)


def mlp(x, ln, gate, up, down):
    h = rms(x, ln)
    return x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)


def linear_pre(x, place, ln, w_qkv, w_z, w_b, w_a, conv, dt_bias, a_log):
    """Projections, causal depthwise convolution and gates. place: each token's index in its row."""
    h = rms(x, ln)
    nk, nz, nh = w_qkv.shape[0], w_z.shape[0], w_b.shape[0]
    qkv, z, b, a = F.linear(h, torch.cat([w_qkv, w_z, w_b, w_a])).split([nk, nz, nh, nh], -1)
    k = conv.shape[-1]
    y = qkv.float() * conv[:, 0, k - 1]
    for back in range(1, k):
        past = F.pad(qkv, (0, 0, back, 0))[: qkv.shape[0]].float()
        y = y + torch.where((place >= back)[:, None], past, 0.0) * conv[:, 0, k - 1 - back]
    g = -a_log.exp() * F.softplus(a.float() + dt_bias)
    return F.silu(y).to(z.dtype), z, b.float().sigmoid(), g


def linear_post(x, o, z, norm, w_out, ln, gate, up, down, eps=1e-6):
    o = o.float()  # [tokens, heads, head_dim]
    o = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + eps) * norm
    o = (o * F.silu(z.float()).view(o.shape)).to(z.dtype).flatten(1)
    return mlp(x + F.linear(o, w_out), ln, gate, up, down)


def rotate(x, cos, sin):
    n = cos.shape[-1]
    r, rest = x[..., :n], x[..., n:]
    half = torch.cat([-r[..., n // 2 :], r[..., : n // 2]], -1)
    return torch.cat([r * cos + half * sin, rest], -1)


def attn_pre(x, ln, w_q, w_k, w_v, q_norm, k_norm, cos, sin):
    d = q_norm.shape[0]
    h = rms(x, ln)
    n = x.shape[0]
    q, gate = F.linear(h, w_q).view(n, -1, 2 * d).chunk(2, -1)
    k, v = F.linear(h, w_k).view(n, -1, d), F.linear(h, w_v).view(n, -1, d)
    cos, sin = cos[:, None], sin[:, None]
    q, k = rotate(rms(q, q_norm), cos, sin).to(v.dtype), rotate(rms(k, k_norm), cos, sin).to(v.dtype)
    return q, k, v, gate.reshape(n, -1)


def attn_post(x, o, gate, w_o, ln, w_gate, up, down):
    return mlp(x + F.linear(o * gate.sigmoid(), w_o), ln, w_gate, up, down)


def final_norm(x, w):
    return rms(x, w)


def cross_entropy(h, head, target):
    logits = F.linear(h, head).float()
    return torch.logsumexp(logits, -1) - logits.gather(-1, target[:, None])[:, 0]


def mtp_in(e, h, w_e, w_h, fc):
    return F.linear(torch.cat([rms(e, w_e), rms(h, w_h)], -1), fc).float()


FUSED = {f.__name__: f for f in (linear_pre, linear_post, attn_pre, attn_post, final_norm, cross_entropy, mtp_in)}


def use_compile():
    for k, f in list(FUSED.items()):
        FUSED[k] = torch.compile(f, dynamic=False)
