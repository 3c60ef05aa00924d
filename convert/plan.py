"""What a conversion does to each tensor: pure data, which ``planning`` makes and ``stream`` carries out."""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx

from mlx_linattn.layout import Take
from mlx_linattn.weights.checkpoint import ITEM_BITS, TensorInfo

from .bits import BALANCED, Quantization, Rule

MTP_FILE = "mtp.safetensors"  # not model*.safetensors: mlx_lm would take it for a shard
CODES = {mx.float32: "F32", mx.bfloat16: "BF16", mx.float16: "F16", mx.uint32: "U32", mx.uint8: "U8"}
DTYPES = {code: dtype for dtype, code in CODES.items()}


@dataclass(frozen=True)
class Options:
    """What the user asked for."""

    quantization: Quantization | None = None
    recipe: str = BALANCED
    rules: tuple[Rule, ...] = ()  # the first that matches decides, before the recipe
    dequantize: bool = False
    dtype: str | None = None  # such as "BF16"; None: what the config says, or in MLX layout what is stored
    keep_mtp: bool = False


@dataclass(frozen=True)
class Output:
    """One tensor as it will lie on disk."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BITS[self.dtype] // 8


@dataclass(frozen=True)
class Entry:
    """One tensor of MLX layout: where it comes from and what it becomes."""

    name: str  # in MLX layout, without outer prefix
    target: str  # on disk
    take: Take  # from stored tensors
    shape: tuple[int, ...]  # of the numbers, not of their packed form
    encoding: str  # of the source, see encodings.py
    before: str  # dtype or bits, for people
    dtype: str  # of the numbers in the result, or of their scales
    was: Quantization | None = None  # where the source is quantized as MLX does it
    quantization: Quantization | None = None
    reason: str = ""  # why it is not quantized as asked
    made: str = ""  # what was done to the numbers besides rounding, in this conversion and before it

    @property
    def parameters(self) -> int:
        return math.prod(self.shape)

    @property
    def module(self) -> str:
        return self.target.removesuffix(".weight")

    @property
    def copied(self) -> bool:
        """Whether MLX-quantized numbers go over bit for bit."""
        return self.was is not None and self.was == self.quantization

    @property
    def outputs(self) -> tuple[Output, ...]:
        q = self.quantization
        if q is None:
            return (Output(self.target, self.dtype, self.shape),)
        *rows, row = self.shape
        groups = (*rows, row // q.group_size)
        packed = Output(self.target, "U32", (*rows, row * q.bits // 32))
        if q.mode != "affine":
            return packed, Output(f"{self.module}.scales", "U8", groups)
        return packed, *(Output(f"{self.module}.{part}", self.dtype, groups) for part in ("scales", "biases"))

    @property
    def nbytes(self) -> int:
        return sum(output.nbytes for output in self.outputs)


@dataclass(frozen=True)
class Plan:
    config: dict  # of the source, as far as possible in stock mlx_lm's words
    model_type: str  # in the result
    stock_problem: str  # why stock mlx_lm cannot run the result by itself, if it cannot
    entries: tuple[Entry, ...]
    mtp: dict[str, TensorInfo]  # kept unchanged in a file of their own
    dropped: dict[str, str]  # stored tensor -> reason

    @property
    def parameters(self) -> int:
        return sum(entry.parameters for entry in self.entries)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries) + sum(info.nbytes for info in self.mtp.values())

    @property
    def bits_per_weight(self) -> float:
        return 8 * sum(entry.nbytes for entry in self.entries) / self.parameters

    def shards(self, limit: int) -> list[tuple[Entry, ...]]:
        """The entries, in order, in files of at most ``limit`` bytes each (a larger tensor has a file of its own)."""
        shards: list[list[Entry]] = []
        room = 0
        for entry in self.entries:
            if not shards or entry.nbytes > room:
                shards.append([])
                room = limit
            shards[-1].append(entry)
            room -= entry.nbytes
        return [tuple(shard) for shard in shards]
