"""The optimizer of the weight matrices."""

import torch


class Muon:
    """Momentum with orthogonalised updates for the matrices; matrices of one shape are handled together."""

    def __init__(self, params, lr, momentum=0.95, wd=0.03):
        self.groups = {}
        for p in params:
            self.groups.setdefault(tuple(p.shape), []).append(p)
        self.buf = {s: torch.zeros(len(ps), *s, device=ps[0].device) for s, ps in self.groups.items()}
        self.lr, self.momentum, self.wd = lr, momentum, wd

    @staticmethod
    def orthogonal(g):
        x = g.bfloat16()
        flip = x.shape[-2] > x.shape[-1]
        if flip:
            x = x.mT
        x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
        for _ in range(5):
            a = x @ x.mT
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
        return x.mT if flip else x

    @torch.no_grad()
    def step(self, scale):
        for s, ps in self.groups.items():
            g = torch.stack([p.grad if p.grad is not None else torch.zeros_like(p) for p in ps])
            m = self.buf[s]
            m.lerp_(g, 1 - self.momentum)
            u = self.orthogonal(g.lerp(m, self.momentum)).float() * (0.2 * max(s) ** 0.5)
            lr = self.lr * scale
            torch._foreach_mul_(ps, 1 - lr * self.wd)
            torch._foreach_add_(ps, list(u.unbind()), alpha=-lr)
