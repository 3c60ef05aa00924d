"""mlx_linattn: linear-attention hybrid language models on Apple Silicon, and wherever else MLX runs.

    import mlx_linattn as la

    model, tokenizer = la.load("demo")
    chat = la.Session(model, tokenizer)
    print(chat.send("My dog is called Pepper."))
    print(chat.send("What is my dog's name?"))

Names, argument order and response fields are mlx_lm's. Importing this package imports neither mlx_lm nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .convert import convert
    from .generate import GenerationResponse, generate, generate_step, stream_generate
    from .load import load, load_model
    from .model import Model
    from .ops import use_backend
    from .sampling import make_logits_processors, make_sampler
    from .session import Session
    from .state import ModelState, Snapshot

_HOMES = {
    "convert": "convert",
    "GenerationResponse": "generate",
    "generate": "generate",
    "generate_step": "generate",
    "stream_generate": "generate",
    "load": "load",
    "load_model": "load",
    "Model": "model",
    "use_backend": "ops",
    "make_logits_processors": "sampling",
    "make_sampler": "sampling",
    "Session": "session",
    "ModelState": "state",
    "Snapshot": "state",
}
__all__ = [*_HOMES, "errors"]


def __getattr__(name: str):
    """Public names are imported when they are first used (PEP 562)."""
    from importlib import import_module

    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    if name == "errors":
        return import_module(".errors", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
