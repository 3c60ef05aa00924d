"""How many bits each weight gets: what was asked for, raised where the family says that a weight needs more."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from mlx_linattn.errors import RequestError
from mlx_linattn.layout import Quantize

MODES = {"affine": (64, 4), "mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}  # default group size and bits
KEEP = {"bf16": "BF16", "f16": "F16", "f32": "F32"}  # rule values that do not quantize
BALANCED, UNIFORM = RECIPES = ("balanced", "uniform")
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
    dtype: str | None = None  # of a weight that a rule keeps unquantized


@dataclass(frozen=True)
class Rule:
    """What a user wants for the weights whose name the pattern is found in."""

    text: str
    pattern: re.Pattern
    quantization: Quantization | None
    dtype: str | None

    @classmethod
    def parse(cls, text: str) -> Rule:
        """From ``REGEX=VALUE[,g=GROUP]``, VALUE being bits (affine), a mode, or a dtype that is kept: 4, mxfp4, bf16."""
        parts = re.fullmatch(r"(.+?)=(\w+)(?:,g=(\d+))?", text.strip())
        if parts is None:
            raise RequestError(
                f"rule {text!r} is not of the form REGEX=VALUE[,g=GROUP], such as 'mlp=4' or 'q_proj=6,g=32'"
            )
        pattern, value, group = parts.groups()
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise RequestError(f"rule {text!r}: {pattern!r} is not a regular expression ({error})") from error
        if value in KEEP:
            if group is not None:
                raise RequestError(f"rule {text!r}: {value} has no groups")
            return cls(text, compiled, None, KEEP[value])
        if value not in MODES and not value.isdecimal():
            raise RequestError(f"rule {text!r}: {value!r} is neither bits nor one of {', '.join([*MODES, *KEEP])}")
        bits, mode = (int(value), "affine") if value.isdecimal() else (None, value)
        return cls(text, compiled, Quantization.make(bits, int(group) if group else None, mode), None)

    def choose(self, shape: tuple[int, ...]) -> Choice:
        q = self.quantization
        if q is not None and shape[-1] % q.group_size:
            return Choice(None, _indivisible(shape, q))
        return Choice(q, f"rule {self.text}", self.dtype)


def parse_rules(texts: Iterable[str], file: Path | None = None) -> tuple[Rule, ...]:
    """Rules of the command line, then those of a recipe file: one a line, ``#`` begins a comment."""
    lines = list(texts)
    if file is not None:
        try:
            lines += file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"{file}: cannot be read ({error})") from error
    return tuple(Rule.parse(line) for line in lines if line.strip() and not line.lstrip().startswith("#"))


def choose(
    module: str, shape: tuple[int, ...], asked: Quantization, rules: Iterable[Quantize], raised: str = ""
) -> Choice:
    """What the weight of ``module`` (a name in MLX layout) gets.

    ``shape`` ends with the axis that is grouped; ``raised`` says why it gets a step of bits more than asked, if it does.
    """
    wanted, reason = asked, ""
    rule = next((rule for rule in rules if re.fullmatch(rule.pattern, module)), None)
    if rule is not None and rule.bits is None:
        return Choice(None, rule.reason)
    offers = [(more_bits(asked.bits), raised)] if raised else []
    offers += [(rule.bits, rule.reason)] if rule is not None else []
    bits, why = max(offers, default=(0, ""))
    if bits > asked.bits:
        wanted, reason = _affine(bits, asked, shape[-1]), why
    if shape[-1] % wanted.group_size:
        return Choice(None, _indivisible(shape, wanted))
    return Choice(wanted, reason)


def more_bits(bits: int) -> int:
    """The next width that affine quantization has."""
    return next((one for one in AFFINE_BITS if one > bits), bits)


def _indivisible(shape: tuple[int, ...], q: Quantization) -> str:
    return f"rows of {shape[-1]} cannot be cut into groups of {q.group_size}"


def _affine(bits: int, asked: Quantization, row: int) -> Quantization:
    """More bits than the asked mode has: affine, in the asked groups where affine has them."""
    group = asked.group_size if asked.group_size in AFFINE_GROUPS else AFFINE_GROUPS[0]
    if asked.mode != "affine" and row % 64 == 0:
        group = 64
    return Quantization(bits, group)
