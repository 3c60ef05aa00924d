"""Carrying a plan out, one tensor at a time, in a folder beside the target that takes the target's name when it is complete.

Killed at any moment, a conversion leaves ``TARGET.partial``. Started again with the same plan, it goes on after the last
finished file: the finished files are the journal. Nothing that loads exists before everything is on disk.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

from mlx_linattn.errors import ConvertError
from mlx_linattn.weights import Tensors

from . import Progress, folder
from .plan import DTYPES, MTP_FILE, Entry, Options, Output, Plan
from .shards import LIMIT, ShardWriter, index, shard_name

MARKER = ".mlx_linattn-convert"  # in an unfinished folder: says that it is ours, and of which plan
NEGLIGIBLE = 1e-6  # of a tensor's largest number


def require_free(target: Path) -> None:
    """Raises ConvertError where ``target`` already holds something."""
    if target.is_dir() and (not any(target.iterdir()) or (target / MARKER).is_file()):
        return
    if target.exists() or target.is_symlink():
        raise ConvertError(f"{target} exists and is not an empty folder; choose another target or delete it first")


def run(
    plan: Plan, tensors: Tensors, options: Options, target: Path, progress: Progress | None = None, limit: int = LIMIT
) -> None:
    """Write the converted model to ``target``."""
    unfinished = target.with_name(target.name + ".partial")
    with _told_plainly(target, unfinished):
        fingerprint = _fingerprint(plan, tensors, limit)
        require_free(target)
        if _only_marked(target, fingerprint):
            return
        _begin(unfinished, target, plan, fingerprint)
        with _alone(unfinished):
            written = write_weights(plan, tensors, unfinished, progress or (lambda *_: None), limit)
            (unfinished / written[0]).write_text(written[1], encoding="utf-8")
            source = tensors.checkpoint.folder
            folder.copy_files(folder.side_files(source, options), unfinished)
            folder.convert_tokenizer(source, unfinished)
            folder.write_json(
                unfinished / "config.json", folder.result_config(tensors.checkpoint.config, plan, options)
            )
            os.replace(unfinished, target)
            (target / MARKER).unlink()


def _only_marked(target: Path, fingerprint: str) -> bool:
    """Whether an earlier run was killed when all that was left to do was to take its mark away."""
    marker = target / MARKER
    if not marker.is_file():
        return False
    if marker.read_text() != fingerprint:
        raise ConvertError(f"{target} holds another conversion; choose another target or delete it first")
    marker.unlink()
    return True


def _begin(unfinished: Path, target: Path, plan: Plan, fingerprint: str) -> None:
    marker = unfinished / MARKER
    if unfinished.exists() and not marker.is_file():
        raise ConvertError(f"{unfinished} is in the way and is not an unfinished conversion; move it elsewhere")
    if unfinished.exists() and marker.read_text() != fingerprint:
        shutil.rmtree(unfinished)  # of another plan, or of a source that has changed since
    if not unfinished.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = target.with_name(target.name + ".partial.new")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        (fresh / MARKER).write_text(fingerprint)
        os.replace(fresh, unfinished)
    done = sum(file.stat().st_size for file in unfinished.glob("*.safetensors"))
    free = shutil.disk_usage(unfinished).free
    if plan.nbytes - done > free:
        raise ConvertError(
            f"{target.parent} has {free / 1e9:.1f} GB free, but the result needs {(plan.nbytes - done) / 1e9:.1f} GB more"
        )


@contextmanager
def _alone(unfinished: Path) -> Iterator[None]:
    """Two runs must not write to one folder. The lock goes with the process, however that ends."""
    if fcntl is None:
        yield
        return
    with (unfinished / MARKER).open() as marker:
        try:
            fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConvertError(f"another conversion is writing to {unfinished}; wait for it") from error
        yield


def _fingerprint(plan: Plan, tensors: Tensors, limit: int) -> str:
    """Of everything that the result's bytes depend on."""
    files = sorted({info.file for info in tensors.checkpoint.tensors.values()})
    stamps = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    text = repr((plan, stamps, json.dumps(tensors.checkpoint.config, sort_keys=True), limit, mx.__version__))
    return hashlib.sha256(text.encode()).hexdigest()


@contextmanager
def _told_plainly(target: Path, unfinished: Path) -> Iterator[None]:
    """Turns what the operating system refuses into one sentence."""
    again = f"what is finished stays in {unfinished}: start again to go on from there, or delete it"
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise ConvertError(f"disk full while writing {target} ({error.strerror}); {again}") from error
        raise ConvertError(f"cannot write {target} ({error.strerror or error}: {error.filename}); {again}") from error


def write_weights(plan: Plan, tensors: Tensors, into: Path, progress: Progress, limit: int) -> tuple[str, str]:
    """Every shard that is not there yet; returns the index's file name and text."""
    shards = plan.shards(limit)
    files, done = [], 0
    for i, entries in enumerate(shards):
        name = shard_name(i, len(shards))
        outputs = [output for entry in entries for output in entry.outputs]
        files.append((name, outputs))
        if (into / name).exists():
            done += sum(entry.nbytes for entry in entries)
            continue
        with ShardWriter(into / name, outputs, _metadata(entries)) as shard:
            for entry in entries:
                progress(done, plan.nbytes, entry.target)
                for target, array in arrays(entry, tensors).items():
                    shard.write(target, array)
                tensors.checkpoint.release()
                done += entry.nbytes
    if plan.mtp and not (into / MTP_FILE).exists():
        _write_mtp(plan, tensors, into)
    progress(plan.nbytes, plan.nbytes, "")
    return index(files, plan.parameters)


def _metadata(entries: tuple[Entry, ...]) -> dict[str, str]:
    """mlx_lm's mark, and what was done to each tensor, so that nobody has to guess it from shapes."""
    made = {entry.target: entry.made for entry in entries if entry.made}
    return {"format": "mlx", "mlx_linattn": json.dumps({"layout": 1, "made": made}, separators=(",", ":"))}


def _write_mtp(plan: Plan, tensors: Tensors, into: Path) -> None:
    """The multi-token-prediction head as it was published: nothing added to norms, nothing transposed."""
    outputs = [Output(name, info.dtype, info.shape) for name, info in plan.mtp.items()]
    layout = "mlx" if tensors.checkpoint.is_mlx else "pt"
    with ShardWriter(into / MTP_FILE, outputs, {"format": layout}) as shard:
        for name in plan.mtp:
            shard.write(name, tensors.checkpoint.read(name))
            tensors.checkpoint.release()


def arrays(entry: Entry, tensors: Tensors) -> dict[str, mx.array]:
    """The outputs of one entry, computed."""
    q, dtype = entry.quantization, DTYPES.get(entry.dtype)
    if entry.was is not None:
        parts = tensors.make_packed(entry.take) or _mlx_parts(entry, tensors)
        if entry.copied:
            return {
                output.name: part.astype(DTYPES[output.dtype]) for output, part in zip(entry.outputs, parts)
            }  # astype: an asked dtype holds for scales as well
        numbers = dequantize(parts, entry.was)
    else:
        numbers = tensors.make(entry.take, dtype or mx.float32)
    if dtype is not None:
        numbers = numbers.astype(dtype)
    if mx.issubdtype(numbers.dtype, mx.floating) and not mx.isfinite(numbers).all().item():
        raise ConvertError(
            f"{tensors.checkpoint.folder}: tensor {entry.name!r} holds NaN or infinite numbers"
            + (", or numbers too large for float16" if entry.dtype == "F16" else "")
        )
    if q is None:
        return {entry.target: numbers}
    packed = mx.quantize(numbers, q.group_size, q.bits, mode=q.mode)
    _check_no_group_lost(entry, numbers, packed)
    return {output.name: part for output, part in zip(entry.outputs, packed)}


def _mlx_parts(entry: Entry, tensors: Tensors) -> list[mx.array]:
    base = entry.name.removesuffix(".weight")
    names = [f"{base}.{part}" for part in ("scales", "biases")]
    return [tensors.read(entry.name), *(tensors.read(name) for name in names if name in tensors)]


def dequantize(parts, q) -> mx.array:
    """The numbers behind [weight, scales, biases]."""
    weight, scales, *biases = parts
    return mx.dequantize(weight, scales, *biases, group_size=q.group_size, bits=q.bits, mode=q.mode)


def _check_no_group_lost(entry: Entry, numbers: mx.array, packed) -> None:
    """A group that had numbers must not have become all zero: a mode's scales can be too coarse for small weights."""
    q = entry.quantization
    before = mx.abs(numbers).reshape(*numbers.shape[:-1], -1, q.group_size).max(-1)
    after = mx.abs(dequantize(packed, q)).reshape(*numbers.shape[:-1], -1, q.group_size).max(-1)
    lost = (after == 0) & (before > NEGLIGIBLE * before.max())
    count = lost.sum().item()
    if count:
        raise ConvertError(
            f"{q} quantization turns {count} of {lost.size} groups of {entry.name!r} into zeros, which they are not; "
            "give this weight another mode or more bits"
        )
