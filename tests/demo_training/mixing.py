"""What mixes tokens: attention, full or in a window with sinks, and the gated delta rule."""

import os

import torch
import torch.nn.functional as F


def full_attention(q, k, v):
    q, k, v = (y.transpose(1, 2) for y in (q, k, v))
    rep = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def window_attention(q, k, v, window, sinks):
    """Each query sees the last `window` positions, itself included, and the first `sinks` ones."""
    b, t, h, d = q.shape
    rep = h // k.shape[2]
    k, v = k.repeat_interleave(rep, 2), v.repeat_interleave(rep, 2)
    pad = -t % window
    if pad:
        q, k, v = (F.pad(y, (0, 0, 0, 0, 0, pad)) for y in (q, k, v))
    n = (t + pad) // window
    slots = 8  # room for the sinks; keeps the mask's rows aligned
    assert sinks <= slots

    def keys(y):
        blocks = y.view(b, n, window, h, d)
        prev = torch.cat([torch.zeros_like(blocks[:, :1]), blocks[:, :-1]], 1)
        first = F.pad(y[:, :slots], (0, 0, 0, 0, 0, max(0, slots - y.shape[1])))[:, None].expand(b, n, slots, h, d)
        return torch.cat([first, prev, blocks], 2)

    kk, vv, qq = keys(k), keys(v), q.view(b, n, window, h, d)
    i = torch.arange(window, device=q.device)[:, None]
    s = torch.arange(slots, device=q.device)[None]
    j = torch.arange(2 * window, device=q.device)[None] - window  # relative to the block's start
    local = (j <= i) & (j > i - window)
    out = []
    for lo, hi in ((0, 1), (1, 2), (2, n)):
        if hi <= lo or lo >= n:
            continue
        if lo == 0:
            m = torch.cat([torch.zeros_like(i * s, dtype=torch.bool), local & (j >= 0)], 1)
        elif lo == 1:
            m = torch.cat([(s < sinks) & (s <= i), local], 1)  # a sink inside the window is counted once
        else:
            m = torch.cat([((s < sinks) & (i >= 0)), local], 1)
        part = [y[:, lo:hi].reshape(-1, y.shape[2], h, d).transpose(1, 2) for y in (qq, kk, vv)]
        o = F.scaled_dot_product_attention(*part, attn_mask=m[None, None])
        out.append(o.transpose(1, 2).reshape(b, -1, h * d))
    return torch.cat(out, 1)[:, :t]


def _fla():
    """fla's chunked kernel. On Hopper, Triton 3.4 to 3.7.0 miscompiles one backward kernel when its key tile is 64
    wide (flash-linear-attention issue 640), and fla then refuses to run; with tiles of 32 the result is right."""
    import fla.ops.common.chunk_o as chunk_o
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    chunk_o.IS_NVIDIA_HOPPER = False
    chunk_o.check_shared_mem = lambda *a, **k: False
    return chunk_gated_delta_rule


def _kda(q, k, v, g, beta, **kw):
    """The same recurrence through the kernel for per-channel decay."""
    from fla.ops.kda import chunk_kda

    rep = v.shape[2] // k.shape[2]
    q, k = q.repeat_interleave(rep, 2), k.repeat_interleave(rep, 2)
    return chunk_kda(q, k, v, g=g[..., None].expand(*g.shape, q.shape[-1]).contiguous(), beta=beta, **kw)


_op = {}


def gated_delta(q, k, v, g, beta, state=None, final=False, impl=None):
    impl = impl or (os.environ.get("GDN_IMPL", "fla") if q.is_cuda else "torch")
    if impl not in _op:
        if impl == "fla":
            _op[impl] = _fla()
        elif impl == "kda":
            _op[impl] = _kda
        else:
            from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

            _op[impl] = torch_chunk_gated_delta_rule
    return _op[impl](
        q, k, v, g=g, beta=beta.to(v.dtype), initial_state=state, output_final_state=final, use_qk_l2norm_in_kernel=True
    )
