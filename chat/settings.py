"""What a person can set during a chat, with its limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx_linattn as la
from mlx_linattn.errors import RequestError

NUMBERS = {  # name: (type, least, most, what it is)
    "temp": (float, 0, None, "sampling temperature; 0 always takes the likeliest token"),
    "top_p": (float, 0, 1, "sample from the likeliest tokens that make up this share; 0: off"),
    "min_p": (float, 0, 1, "least probability relative to the best; 0: off"),
    "top_k": (int, 0, None, "sample from the likeliest K; 0: all"),
    "max_tokens": (int, -1, None, "longest answer; -1: no limit"),
    "seed": (int, 0, None, "of the sampler, for repeatable answers"),
}
SWITCHES = {
    "markdown": "show answers formatted; off: as the model writes them",
    "stats": "the line under each answer",
    "think": "let the model think first",
}
NAMES = [*NUMBERS, *SWITCHES]


@dataclass
class Settings:
    temp: float = 0.0
    top_p: float = 0.0
    min_p: float = 0.0
    top_k: int = 0
    max_tokens: int = -1
    seed: int | None = None
    markdown: bool = True
    stats: bool = True
    prefill_step_size: int | None = None

    def number(self, name: str, text: str, shown: str = "") -> None:
        """Set a number. Raises RequestError, in the words of a person who typed ``text``."""
        kind, least, most, _ = NUMBERS[name]
        limits = f"{least} or more" if most is None else f"between {least} and {most}"
        wanted = f"{'a whole number' if kind is int else 'a number'}, {limits}"
        try:
            value = kind(text)
        except ValueError as error:
            raise RequestError(f"{shown or name} is {text!r}, expected {wanted}") from error
        if not (value >= least and (most is None or value <= most)) or (name == "max_tokens" and value == 0):
            raise RequestError(f"{shown or name} is {text}, expected {wanted}")
        setattr(self, name, value)
        if name == "seed":
            import mlx.core as mx

            mx.random.seed(value)

    def stream_options(self) -> dict[str, Any]:
        """Arguments of :meth:`Session.stream`."""
        sampler = None  # the likeliest token; samplers are mlx_lm's, whose import costs a second
        if self.temp > 0:
            sampler = la.make_sampler(temp=self.temp, top_p=self.top_p, min_p=self.min_p, top_k=self.top_k)
        return {"max_tokens": self.max_tokens, "sampler": sampler}


def switch(name: str, text: str) -> bool:
    """on or off."""
    if text.lower() in ("on", "true", "yes", "1"):
        return True
    if text.lower() in ("off", "false", "no", "0"):
        return False
    raise RequestError(f"{name} is {text!r}, expected on or off")
