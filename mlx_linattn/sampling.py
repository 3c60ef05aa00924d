"""Samplers and logits processors: mlx_lm's own."""

from __future__ import annotations

from .interop.door import mlx_lm

_utils = mlx_lm("sample_utils")
make_sampler = _utils.make_sampler
make_logits_processors = _utils.make_logits_processors
