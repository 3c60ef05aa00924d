"""Converting and quantizing checkpoints into MLX layout, in bounded memory; the result loads here and in stock mlx_lm.

from mlx_linattn import convert

convert("Qwen/Qwen3.5-4B", "qwen-4bit", quantize=True, q_bits=4)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_linattn.weights import Tensors

    from .plan import Options, Plan

Progress = Callable[[int, int, str], None]

__all__ = ["Conversion", "convert", "prepare"]


@dataclass(frozen=True)
class Conversion:
    """A conversion that has been planned: ``plan`` says what :meth:`write` does."""

    target: Path
    plan: Plan
    options: Options
    tensors: Tensors

    @property
    def source(self) -> Path:
        return self.tensors.checkpoint.folder

    @property
    def notes(self) -> list[str]:
        """What the source lacks, as sentences."""
        from .folder import missing

        return missing(self.source)

    def write(self, progress: Progress | None = None, shard_size: int | None = None) -> None:
        """Write the result. ``progress`` is called with (bytes written, bytes in all, tensor name).

        Interrupted, it leaves the target's name + ".partial"; the same conversion, started again, goes on from there.
        Raises ConvertError where the result cannot be written.
        """
        from . import stream

        stream.run(self.plan, self.tensors, self.options, self.target, progress, shard_size or stream.LIMIT)


def prepare(
    hf_path: str | Path,
    mlx_path: str | Path = "mlx_model",
    quantize: bool = False,
    q_group_size: int | None = None,
    q_bits: int | None = None,
    q_mode: str = "affine",
    dtype: str | None = None,
    *,
    recipe: str = "balanced",
    rules: Iterable[str] = (),
    recipe_file: str | Path | None = None,
    revision: str | None = None,
    dequantize: bool = False,
    keep_mtp: bool = False,
) -> Conversion:
    """A planned conversion; arguments as in :func:`convert`. Raises CheckpointError where the source cannot be used as it is."""
    from mlx_linattn.checkpoint import Checkpoint
    from mlx_linattn.errors import RequestError
    from mlx_linattn.loading import DTYPES, resolve

    from . import folder
    from .bits import RECIPES, Quantization, parse_rules
    from .plan import Options, make_plan

    if dtype is not None and dtype not in DTYPES:
        raise RequestError(f"dtype {dtype!r} is not known; choose one of {', '.join(DTYPES)}")
    if not quantize and (q_bits is not None or q_group_size is not None or q_mode != "affine"):
        raise RequestError("bits, group size or mode are given, but quantize (-q) is not")
    parsed = parse_rules(rules, None if recipe_file is None else Path(recipe_file))
    if (quantize or parsed) and dequantize:
        raise RequestError("choose either quantize or dequantize, not both")
    if recipe not in RECIPES:
        raise RequestError(f"recipe {recipe!r} is not known; choose one of {', '.join(RECIPES)}")
    options = Options(
        quantization=Quantization.make(q_bits, q_group_size, q_mode) if quantize else None,
        recipe=recipe,
        rules=parsed,
        dequantize=dequantize,
        dtype=next((code for code, name in folder.NAMES.items() if name == dtype), None),
        keep_mtp=keep_mtp,
    )
    plan, tensors = make_plan(Checkpoint(resolve(hf_path, revision)), options)
    return Conversion(Path(mlx_path).expanduser().absolute(), plan, options, tensors)


def convert(
    hf_path: str | Path,
    mlx_path: str | Path = "mlx_model",
    quantize: bool = False,
    q_group_size: int | None = None,
    q_bits: int | None = None,
    q_mode: str = "affine",
    dtype: str | None = None,
    *,
    progress: Progress | None = None,
    shard_size: int | None = None,
    **options: Any,
) -> Conversion:
    """Write the model ``hf_path`` (a folder, a Hub id or ``demo``) to the folder ``mlx_path``, which must be new or empty.

    Args:
        quantize: quantize weights, as the family allows; ``q_bits``, ``q_group_size`` and ``q_mode`` say how.
        dtype: "float32", "float16" or "bfloat16" for everything else; what the config says by default.
            Decays and other gate parameters are float32 in any case.
        progress: see :meth:`Conversion.write`.
        shard_size: largest weight file in bytes, 5 GiB by default.
        recipe: "balanced" gives mixers and head a step more bits, "uniform" only what is unsafe with fewer.
        rules: ``REGEX=VALUE[,g=GROUP]`` for weights by name, before the recipe; the first that matches decides.
        recipe_file: a file with one such rule a line.
        revision: branch, tag or commit on the Hub.
        dequantize: turn quantized weights into plain numbers.
        keep_mtp: keep the multi-token-prediction head, unchanged, in ``mtp.safetensors``.

    Raises CheckpointError where the source cannot be used as it is, ConvertError where the result cannot be written.
    """
    conversion = prepare(hf_path, mlx_path, quantize, q_group_size, q_bits, q_mode, dtype, **options)
    conversion.write(progress, shard_size)
    return conversion


class _Callable(ModuleType):
    """Python binds ``mlx_linattn.convert`` to this package once it is imported; calling that must convert as well."""

    def __call__(self, *args, **kwargs) -> Conversion:
        return convert(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
