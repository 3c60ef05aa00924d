"""Which lengths the rows of each training step have, and which positions their tokens."""

import random

import torch


def make_schedule(total, tokens=131072, seed=0):
    """(rows, length) of every step: short dialogues first, then longer and longer ones."""
    r = random.Random(seed)
    out = []
    for i in range(total):
        p = i / total
        if p < 0.18:
            lengths, odds = [512], [1]
        elif p < 0.5:
            lengths, odds = [512, 1024, 2048, 4096], [1, 2, 3, 4]
        else:
            lengths, odds = [1024, 4096, 8192, 16384, 32768, 65536, 131072], [1.5, 3, 2, 1.5, 1.2, 0.7, 0.5]
        n = r.choices(lengths, odds)[0]
        out.append((tokens // n, n))
    return out


def make_mix(total, tokens=131072, seed=0):
    """Lengths for the second stage: mostly short rows, where copying is learnt, and all lengths to 65536 from the start."""
    r = random.Random(f"mix/{seed}")
    lengths, odds = [512, 1024, 2048, 4096, 8192, 16384, 32768, 65536], [46, 16, 8, 12, 6, 5, 4, 3]
    return [(tokens // n, n) for n in (512 if i < 4 else r.choices(lengths, odds)[0] for i in range(total))]


def positions_for(b, t, r):
    """Positions with random gaps, so that attention meets distances far beyond the row's length."""
    pos = torch.arange(t)[None].repeat(b, 1)
    if r.random() < 0.5:
        for row in range(b):
            for _ in range(r.randint(1, 2)):
                at = r.randint(4, t - 1) if r.random() < 0.7 else 4
                pos[row, at:] += int(2 ** r.uniform(0, 16.8))
    return pos
