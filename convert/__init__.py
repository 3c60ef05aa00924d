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

from mlx_linattn.errors import RequestError

if TYPE_CHECKING:
    from mlx_linattn.weights import Tensors

    from .plan import Options, Plan
    from .verify import Verification

Progress = Callable[[int, int, str], None]

__all__ = ["Conversion", "convert", "prepare"]


@dataclass(frozen=True)
class Conversion:
    """A conversion that has been planned: ``plan`` says what :meth:`write` does."""

    source: str  # as it was given
    revision: str | None
    target: Path
    plan: Plan
    options: Options
    tensors: Tensors

    @property
    def notes(self) -> list[str]:
        """What the source lacks and what the result needs, as sentences."""
        from .folder import missing

        notes = missing(self.tensors.checkpoint.folder)
        if self.plan.stock_problem:
            notes.append(f"{self.plan.stock_problem}: there the result needs --trust-remote-code and mlx-linattn")
        return notes

    def write(
        self,
        progress: Progress | None = None,
        shard_size: int | None = None,
        *,
        verify: bool = True,
        calibration: str | Path | None = None,
        max_kl: float | None = None,
        force: bool = False,
        command: str = "",
    ) -> Verification | None:
        """Write the result, with a report and a model card, and return what verifying it found.

        Interrupted, it leaves the target's name + ".partial"; the same conversion, started again, goes on from there.

        Args:
            progress: called with (bytes written, bytes in all, tensor name).
            verify, calibration, max_kl, force: see :func:`convert`.
            command: what the report says that was typed.

        Raises ConvertError where the result cannot be written, or is not what it should be.
        """
        from . import folder, stream
        from .report import CARD, REPORT, card, report
        from .verify import Check
        from .verify import verify as check_result

        check = Check(None if calibration is None else Path(calibration), max_kl)
        if not verify and (calibration is not None or max_kl is not None):
            raise RequestError("calibration text or a largest KL is given, but nothing is to be verified")
        found = []

        def finish(unfinished: Path, config: dict) -> None:
            checked = check_result(self.plan, self.tensors, unfinished, config, check) if verify else None
            found.append(checked)
            made = report(self.plan, self.source, self.revision, command, checked)
            folder.write_json(unfinished / REPORT, made)
            (unfinished / CARD).write_text(card(made), encoding="utf-8")

        limit = shard_size or stream.LIMIT
        stream.run(self.plan, self.tensors, self.options, self.target, progress, limit, force, finish)
        return found[0] if found else None


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
    headers_only: bool = False,
) -> Conversion:
    """A planned conversion; arguments as in :func:`convert`.

    With ``headers_only`` a model on the Hub is planned without downloading its weights, and cannot be written. Raises CheckpointError where the source cannot be used as it is."""
    from mlx_linattn.loading import DTYPES, local_folder, resolve
    from mlx_linattn.weights.checkpoint import Checkpoint

    from . import folder
    from .bits import RECIPES, Quantization, parse_rules
    from .plan import Options
    from .planning import make_plan

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
    if headers_only and local_folder(hf_path) is None:
        from .hub import headers

        checkpoint = headers(str(hf_path), revision)
    else:
        checkpoint = Checkpoint(resolve(hf_path, revision))
    plan, tensors = make_plan(checkpoint, options)
    return Conversion(str(hf_path), revision, Path(mlx_path).expanduser().absolute(), plan, options, tensors)


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
    verify: bool = True,
    calibration: str | Path | None = None,
    max_kl: float | None = None,
    force: bool = False,
    upload_repo: str | None = None,
    **options: Any,
) -> Conversion:
    """Write the model ``hf_path`` (a folder, a Hub id or ``demo``) to the folder ``mlx_path``, which must be new or empty.

    Args:
        quantize: quantize weights, as the family allows; ``q_bits``, ``q_group_size`` and ``q_mode`` say how.
        dtype: "float32", "float16" or "bfloat16" for everything else; what the config says by default.
            Decays and other gate parameters are float32 in any case.
        progress: see :meth:`Conversion.write`.
        shard_size: largest weight file in bytes, 5 GiB by default.
        verify: read the result back, compare every tensor with its source, and both models on a page of text.
        calibration: a file of more text to compare them on.
        max_kl: the mean KL divergence above which the result is refused.
        force: replace a model that is in ``mlx_path``.
        upload_repo: put the result into this repository on the Hub.
        recipe: "balanced" gives mixers and head a step more bits, "uniform" only what is unsafe with fewer.
        rules: ``REGEX=VALUE[,g=GROUP]`` for weights by name, before the recipe; the first that matches decides.
        recipe_file: a file with one such rule a line.
        revision: branch, tag or commit on the Hub.
        dequantize: turn quantized weights into plain numbers.
        keep_mtp: keep the multi-token-prediction head, unchanged, in ``mtp.safetensors``.

    Raises CheckpointError where the source cannot be used as it is, ConvertError where the result cannot be written.
    """
    conversion = prepare(hf_path, mlx_path, quantize, q_group_size, q_bits, q_mode, dtype, **options)
    told = {
        "quantize": quantize,
        "q_bits": q_bits,
        "q_group_size": q_group_size,
        "q_mode": q_mode,
        "dtype": dtype,
        **options,
    }
    words = [repr(str(hf_path)), repr(str(mlx_path)), *(f"{key}={value!r}" for key, value in told.items() if value)]
    conversion.write(
        progress,
        shard_size,
        verify=verify,
        calibration=calibration,
        max_kl=max_kl,
        force=force,
        command=f"mlx_linattn.convert({', '.join(words)})",
    )
    if upload_repo is not None:
        from .hub import upload

        upload(conversion.target, upload_repo)
    return conversion


class _Callable(ModuleType):
    """Python binds ``mlx_linattn.convert`` to this package once it is imported; calling that must convert as well."""

    def __call__(self, *args, **kwargs):
        return convert(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
