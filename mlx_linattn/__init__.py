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
    from .engine import (
        Answer,
        Done,
        Engine,
        Progress,
        Reasoning,
        Request,
        Stream,
        Text,
        Timing,
        TokenLogprob,
        ToolCall,
        Usage,
    )
    from .generation import GenerationResponse, generate, generate_step, stream_generate
    from .loading import load, load_model
    from .model import Model
    from .ops import use_backend
    from .sampling import make_logits_processors, make_sampler
    from .session import Session
    from .state import KVOptions, ModelState, Snapshot

__all__ = [
    "Answer",
    "Done",
    "Engine",
    "GenerationResponse",
    "KVOptions",
    "Model",
    "ModelState",
    "Progress",
    "Reasoning",
    "Request",
    "Session",
    "Snapshot",
    "Stream",
    "Text",
    "Timing",
    "TokenLogprob",
    "ToolCall",
    "Usage",
    "convert",
    "generate",
    "generate_step",
    "load",
    "load_model",
    "make_logits_processors",
    "make_sampler",
    "stream_generate",
    "use_backend",
]

# Where each public name lives. They are imported when they are first used (PEP 562); a module must not share its
# name with a function here, since importing it would put the module in the function's place.
_HOMES = {
    "convert": ("convert",),  # this package is itself callable
    "engine": (
        "Answer",
        "Done",
        "Engine",
        "Progress",
        "Reasoning",
        "Request",
        "Stream",
        "Text",
        "Timing",
        "TokenLogprob",
        "ToolCall",
        "Usage",
    ),
    "generation": ("GenerationResponse", "generate", "generate_step", "stream_generate"),
    "loading": ("load", "load_model"),
    "model": ("Model",),
    "ops": ("use_backend",),
    "sampling": ("make_logits_processors", "make_sampler"),
    "session": ("Session",),
    "state": ("KVOptions", "ModelState", "Snapshot"),
}


def __getattr__(name: str):
    from importlib import import_module

    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f".{home}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
