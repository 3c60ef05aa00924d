"""Reading a config.json strictly: a missing key, or a switch set to something unknown, is an error that names it."""

from __future__ import annotations

from typing import Any

from ..errors import CheckpointError
from ..spec import RopeSpec

_REQUIRED = object()


class Config:
    """A config's text part, looked up key by key."""

    def __init__(self, config: dict):
        self._values = {**config, **config.get("text_config", {})}
        # tie_word_embeddings may sit beside text_config, and then counts
        for key in ("tie_word_embeddings",):
            if key in config:
                self._values[key] = config[key]

    def get(self, key: str, default: Any = _REQUIRED) -> Any:
        value = self._values.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise CheckpointError(f"config.json: {key!r} is missing")
        return default

    def part(self, key: str) -> Config:
        """The object under ``key``, to be read as strictly."""
        value = self.get(key)
        if not isinstance(value, dict):
            raise CheckpointError(f"config.json: {key} is {value!r}, expected an object")
        return Config(value)

    def integer(self, key: str, default: Any = _REQUIRED) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise CheckpointError(f"config.json: {key} is {value!r}, expected a whole number")
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        value = self.get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise CheckpointError(f"config.json: {key} is {value!r}, expected a number")
        return float(value)

    def only(self, key: str, *allowed: Any) -> Any:
        """A switch of which we know these values; the first is the default."""
        value = self.get(key, allowed[0])
        if value not in allowed:
            known = " or ".join(repr(one) for one in allowed)
            raise CheckpointError(f"config.json: {key} is {value!r}, but only {known} is supported")
        return value

    def layer_types(self, linear: str, full: str) -> list[str]:
        """Each layer's kind: ``layer_types`` where present, else a full layer every ``full_attention_interval``."""
        count = self.integer("num_hidden_layers")
        kinds = self.get("layer_types", None)
        if kinds is None:
            interval = self.integer("full_attention_interval", 4)
            kinds = [full if (i + 1) % max(interval, 1) == 0 else linear for i in range(count)]
        unknown = [kind for kind in kinds if kind not in (linear, full)]
        if unknown:
            raise CheckpointError(
                f"config.json: layer_types holds {unknown[0]!r}, but only {linear!r} and {full!r} are supported"
            )
        if len(kinds) != count:
            raise CheckpointError(f"config.json: layer_types has {len(kinds)} entries, num_hidden_layers is {count}")
        return kinds

    def rope(self, head_dim: int, *, theta: float, partial: float) -> RopeSpec:
        """Rotary embedding from ``rope_parameters``, ``rope_scaling`` or the top-level keys; ``theta``, ``partial``: defaults."""
        found = {**(self.get("rope_scaling", None) or {}), **(self.get("rope_parameters", None) or {})}
        kind = found.get("rope_type", found.get("type", "default"))
        if kind != "default":
            raise CheckpointError(f"config.json: rope_type is {kind!r}, but only 'default' is supported")
        factor = found.get("partial_rotary_factor", self.number("partial_rotary_factor", partial))
        return RopeSpec(
            dims=int(head_dim * factor), theta=float(found.get("rope_theta", self.number("rope_theta", theta)))
        )
