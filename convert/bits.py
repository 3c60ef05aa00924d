"""How many bits each weight gets: what was asked for, raised where the family says that a weight needs more."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from mlx_linattn.errors import RequestError
from mlx_linattn.layout import Quantize

MODES = {"affine": (64, 4), "mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}  # default group size and bits
AFFINE_GROUPS, AFFINE_BITS = (32, 64, 128), (2, 3, 4, 5, 6, 8)


@dataclass(frozen=True)
class Quantization:
    """Integers of ``bits`` bits; each group of ``group_size`` along the last axis shares a scale (and, affine, an offset)."""

    bits: int
    group_size: int
    mode: str = "affine"

    @classmethod
    def make(cls, bits: int | None = None, group_size: int | None = None, mode: str = "affine") -> Quantization:
        """With the mode's defaults; raises RequestError for what MLX cannot do."""
        if mode not in MODES:
            raise RequestError(f"quantization mode {mode!r} is not known; choose one of {', '.join(MODES)}")
        default_group, default_bits = MODES[mode]
        made = cls(default_bits if bits is None else bits, default_group if group_size is None else group_size, mode)
        allowed_groups = AFFINE_GROUPS if mode == "affine" else (default_group,)
        allowed_bits = AFFINE_BITS if mode == "affine" else (default_bits,)
        for what, value, allowed in (
            ("bits", made.bits, allowed_bits),
            ("group size", made.group_size, allowed_groups),
        ):
            if value not in allowed:
                known = ", ".join(str(one) for one in allowed)
                raise RequestError(f"{mode} quantization with {what} {value} does not exist; choose {what} {known}")
        return made

    def __str__(self) -> str:
        usual = MODES[self.mode][0] == self.group_size
        return (f"{self.bits}-bit" if self.mode == "affine" else self.mode) + ("" if usual else f" g{self.group_size}")

    def config(self) -> dict:
        """As config.json spells it."""
        return asdict(self)


@dataclass(frozen=True)
class Choice:
    quantization: Quantization | None
    reason: str = ""  # why it is not what was asked for


def choose(module: str, shape: tuple[int, ...], asked: Quantization, rules: Iterable[Quantize]) -> Choice:
    """What the weight of ``module`` (a name in MLX layout) gets; ``shape`` ends with the axis that is grouped."""
    wanted, reason = asked, ""
    rule = next((rule for rule in rules if re.fullmatch(rule.pattern, module)), None)
    if rule is not None and rule.bits is None:
        return Choice(None, rule.reason)
    if rule is not None and rule.bits > asked.bits:
        wanted, reason = _affine(rule.bits, asked, shape[-1]), rule.reason
    if shape[-1] % wanted.group_size:
        return Choice(None, f"rows of {shape[-1]} cannot be cut into groups of {wanted.group_size}")
    return Choice(wanted, reason)


def _affine(bits: int, asked: Quantization, row: int) -> Quantization:
    """More bits than the asked mode has: affine, in the asked groups where affine has them."""
    group = asked.group_size if asked.group_size in AFFINE_GROUPS else AFFINE_GROUPS[0]
    if asked.mode != "affine" and row % 64 == 0:
        group = 64
    return Quantization(bits, group)
