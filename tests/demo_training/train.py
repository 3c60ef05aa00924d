"""Trains the demo model on one GPU.

    python data.py tokenizer demo
    python train.py --dir demo

Each step is one batch of 131072 tokens. The MTP head learns from the trunk's detached states, so that it does not
influence the trunk. A run that was stopped goes on from --state.
"""

import argparse
import json
import os
import random
import time
import traceback
from pathlib import Path

import model as M
import torch
from encoder import ANSWER, CONTEXT
from functions import FUSED, use_compile
from muon import Muon
from rows import Rows
from safetensors.torch import save_file
from schedule import make_mix, make_schedule, positions_for
from torch.utils.data import DataLoader


def options():
    ap = argparse.ArgumentParser()
    ap.add_argument("--dir", default="demo", help="folder with tokenizer.json; the checkpoint goes there too")
    ap.add_argument("--state", default="state.pt", help="training state, for going on later")
    ap.add_argument("--seconds", type=float, default=3600, help="stop (and save) after this long")
    ap.add_argument("--steps", type=int, default=3400)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--adam-lr", type=float, default=3e-3)
    ap.add_argument("--optimizer", default="muon", choices=["muon", "adamw"])
    ap.add_argument("--window-share", type=float, default=0.7)
    ap.add_argument("--workers", type=int, default=13)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--no-compile", action="store_true")
    ap.add_argument("--device", default="cuda")
    ap.add_argument("--schedule", default="", help="for tests: ROWSxLENGTH for all steps")
    ap.add_argument("--init", default="", help="start from this checkpoint's weights")
    ap.add_argument("--dense", type=float, default=0.0, help="share of rows with many easily confused facts")
    ap.add_argument("--warmup", type=int, default=150)
    ap.add_argument(
        "--decay-from", type=float, default=0.7, help="the learning rate falls to zero from this share of the steps on"
    )
    ap.add_argument(
        "--open", type=float, default=0.0, help="share of dialogues with words from open sets; the second stage"
    )
    ap.add_argument("--accents", type=float, default=0.08, help="with --open: share of names with accented letters")
    ap.add_argument("--context", type=float, default=0.2, help="weight of the loss of everything but answers")
    ap.add_argument("--by-time", action="store_true", help="the learning rate follows the clock, to end with --seconds")
    ap.add_argument("--keep", default="", help="also save here, now and then")
    ap.add_argument("--log", default="", help="also write the progress lines here")
    return ap.parse_args()


def optimizers(net, a):
    """Muon for the matrices (None with --optimizer adamw), AdamW for the rest."""
    named = dict(net.named_parameters())
    matrix = []
    if a.optimizer == "muon":
        matrix = [n for n, p in named.items() if p.ndim == 2 and min(p.shape) > 8 and "embed" not in n]
    rest = [p for n, p in named.items() if n not in matrix]
    groups = [
        {"params": [p for p in rest if p.ndim == 2], "weight_decay": 0.01},
        {"params": [p for p in rest if p.ndim != 2], "weight_decay": 0.0},
    ]
    fused = a.device == "cuda"
    adam = torch.optim.AdamW(groups, lr=a.adam_lr, betas=(0.9, 0.98), eps=1e-10, fused=fused)
    return Muon([named[n] for n in matrix], a.lr) if matrix else None, adam


def resume(net, muon, adam, a):
    """The step to begin with: 0, or where --state stopped."""
    if not os.path.exists(a.state):
        return 0
    saved = torch.load(a.state, map_location=a.device, weights_only=False)
    net.load_state_dict(saved["model"])
    adam.load_state_dict(saved["adam"])
    for k, v in saved["muon"].items():
        muon.buf[k].copy_(v)
    print("going on at step", saved["step"], flush=True)
    return saved["step"]


def batches(a, step0):
    schedule = make_mix(a.steps, seed=a.seed) if a.open else make_schedule(a.steps)
    if a.schedule:
        b, t = map(int, a.schedule.split("x"))
        schedule = [(b, t)] * a.steps
    return iter(
        DataLoader(
            Rows(a.dir, schedule, a.seed, a.dense, a.open, a.accents),
            batch_size=None,
            sampler=range(step0, a.steps),
            num_workers=a.workers,
            prefetch_factor=(16 if a.open else 3) if a.workers else None,
            pin_memory=False,
            collate_fn=lambda x: x,
        )
    )


def mean(values, mask):
    return (values * mask).sum() / mask.sum().clamp(min=1)


def losses(net, ids, cls, pos, window, sinks, context, draft):
    """(what to minimise, [answers, context, MTP answers] for the log)"""
    h = net.trunk(ids, pos, window, sinks)
    nothing = torch.zeros_like(ids[:, :1])
    no_class = nothing.to(cls.dtype)
    target = torch.cat([ids[:, 1:], nothing], 1)
    c = torch.cat([cls[:, 1:], no_class], 1).reshape(-1)
    head = net.model.embed_tokens.weight
    ce = FUSED["cross_entropy"](h, head, target.reshape(-1))
    answer = (c == ANSWER).float()
    loss_answer, loss_context = mean(ce, answer), mean(ce, (c == CONTEXT).float())
    # rows of many thousand tokens have few answers in them: let those weigh accordingly
    loss = loss_answer * (answer.sum() / 3000).clamp(max=1).sqrt() + context * loss_context
    loss_mtp = torch.zeros((), device=ids.device)
    if draft:  # on the trunk's states as they are: the trunk does not feel it
        e = net.draft(h.detach(), target, pos, window, sinks)
        two = torch.cat([ids[:, 2:], nothing, nothing], 1).reshape(-1)
        c = torch.cat([cls[:, 2:], no_class, no_class], 1).reshape(-1)
        ce = FUSED["cross_entropy"](e, head.detach(), two)
        loss_mtp = mean(ce, (c == ANSWER).float())
        loss = loss + loss_mtp + 0.2 * mean(ce, (c == CONTEXT).float())
    return loss, torch.stack([loss_answer.detach(), loss_context.detach(), loss_mtp.detach()])


def draw_attention(a, t, r):
    """(window, sinks) of a batch with rows of ``t`` tokens; a window of None is full attention."""
    window = None
    if r.random() < a.window_share or (t > 32768 * (1 if a.open else 2) and r.random() < 0.7):
        window = r.choice([128, 256, 256])
    return window, r.choice([4, 4, 4, 0]) if window else 0


class Progress:
    """Mean losses by row length and kind of attention, a line every so often."""

    def __init__(self, a, t0):
        self.a, self.t0 = a, t0
        self.clear()

    def clear(self):
        self.sums, self.since, self.tokens = {}, time.time(), 0

    def add(self, b, t, window, parts):
        self.tokens += b * t
        s = self.sums.setdefault((t, "w" if window else "f"), [0, torch.zeros_like(parts)])
        s[0] += 1
        s[1] += parts

    def line(self, step):
        if self.a.device == "cuda":
            torch.cuda.synchronize()
        now = time.time()
        words = [f"{now - self.t0:6.0f}s step {step + 1}/{self.a.steps}"]
        words.append(f"{self.tokens / (now - self.since) / 1e6:.2f} Mtok/s")
        for (t, kind), (n, s) in sorted(self.sums.items()):
            words.append(f"{t}{kind}:{s[0] / n:.3f}/{s[1] / n:.2f}" + (f"/{2 * s[2] / n:.2f}" if s[2] > 0 else ""))
        print(" ".join(words), flush=True)
        if self.a.log:
            with open(self.a.log, "a") as f:
                f.write(" ".join(words) + "\n")
        self.clear()


def save(net, muon, adam, step, a):
    save_file(M.tensors_to_save(net), os.path.join(a.dir, "model.safetensors"), metadata={"format": "pt"})
    state = {"model": net.state_dict(), "adam": adam.state_dict(), "muon": muon.buf if muon else {}, "step": step}
    torch.save(state, a.state)
    Path(a.dir, "config.json").write_text(json.dumps(M.CONFIG, indent=2))


def main():
    a, t0 = options(), time.time()
    torch.manual_seed(a.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    cuda = a.device == "cuda"
    net = (M.load(a.init).train() if a.init else M.Model()).to(a.device)
    if not a.no_compile:
        use_compile()
    print("parameters", sum(p.numel() for p in net.parameters()), flush=True)
    muon, adam = optimizers(net, a)
    step0 = resume(net, muon, adam, a)
    loader, r, progress = batches(a, step0), random.Random(a.seed + step0), Progress(a, t0)
    step, start, kept = step0, None, 0
    for step, ids, cls in loader:
        ids, cls = torch.as_tensor(ids).to(a.device).long(), torch.as_tensor(cls).to(a.device)
        b, t = ids.shape
        if step == step0 + 4:
            start = time.time()
        done = step / a.steps
        if a.by_time:
            done = 0.0 if start is None else (time.time() - start) / (t0 + a.seconds - start)
        scale = min(1.0, (step + 1) / a.warmup) * min(1.0, max(0.0, 1 - done) / (1 - a.decay_from))
        for g in adam.param_groups:
            g["lr"] = a.adam_lr * scale
        window, sinks = draw_attention(a, t, r)
        pos = positions_for(b, t, r).to(a.device, non_blocking=True)
        draft = done > (0.1 if a.open else 0.25) and step % 2 == 0
        with torch.autocast(a.device, torch.bfloat16, enabled=cuda):
            loss, parts = losses(net, ids, cls, pos, window, sinks, a.context, draft)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        if muon:
            muon.step(scale)
        adam.step()
        adam.zero_grad(set_to_none=True)
        progress.add(b, t, window, parts)
        if (step + 1) % (100 if cuda else 20) == 0 or step == step0 + 20:
            progress.line(step)
        if a.keep and done > (0.55, 0.8, 9)[kept]:
            kept += 1
            save_file(M.tensors_to_save(net), a.keep, metadata={"format": "pt"})
        if time.time() - t0 > a.seconds:
            break
    if cuda:
        print("peak GiB", torch.cuda.max_memory_allocated() / 2**30)
    save(net, muon, adam, step + 1, a)
    print("saved at step", step + 1, "after", round(time.time() - t0), "s", flush=True)
    for w in getattr(loader, "_workers", []):  # their full queues would keep them, and the output pipe, alive
        w.kill()
    os._exit(0)


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
