"""Where other people's programs meet this library: stock mlx_lm in both directions, tokenizers, and plug-ins."""

from __future__ import annotations

__all__ = ["register"]


def register() -> list[str]:
    """Teach the mlx_lm of this process the model types that it lacks; returns them.

    From then on its ``load``, ``generate``, ``server`` and ``BatchGenerator`` take published checkpoints of these types, and
    converted ones too, which otherwise need ``--trust-remote-code``: ``load(path, model_config={"model_file": None})``.
    A type that mlx_lm has stays mlx_lm's, ``minimax`` among them, by which it means MiniMax-M2. Doing it twice does no harm.

    What mlx_lm does to caches works with these models (rows that come and go, files, ``kv_bits``), except going back:
    no cache that contains a recurrent layer can be trimmed, so there is no speculative decoding. ``max_kv_size`` has
    no effect on any model with a ``make_cache`` of its own, in mlx_lm as here.
    """
    from .stock import register as register_here

    return register_here()
