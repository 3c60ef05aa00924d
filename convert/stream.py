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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

from mlx_linattn.errors import ConvertError
from mlx_linattn.loading import convert_tokenizer
from mlx_linattn.weights import Tensors

from . import Progress, folder
from .plan import MTP_FILE, Entry, Options, Output, Plan
from .shards import LIMIT, ShardWriter, index, shard_name
from .tensors import arrays, pieces

MARKER = ".mlx_linattn-convert"  # in an unfinished folder: says that it is ours, and of which plan


def require_free(target: Path, force: bool = False, source: Path | None = None) -> None:
    """Raises ConvertError where ``target`` already holds something, unless it is a model that may be replaced."""
    if force and (target / "config.json").is_file():
        if source is not None and target.samefile(source):
            raise ConvertError(f"{target} is the source itself; choose another target")
        return
    if target.is_dir() and (not any(target.iterdir()) or (target / MARKER).is_file()):
        return
    if target.exists() or target.is_symlink():
        raise ConvertError(f"{target} exists and is not an empty folder; choose another target or delete it first")


def run(
    plan: Plan,
    tensors: Tensors,
    options: Options,
    target: Path,
    progress: Progress | None = None,
    limit: int = LIMIT,
    force: bool = False,
    finish: Callable[[Path, dict], None] = lambda folder, config: None,
) -> None:
    """Write the converted model to ``target``.

    ``finish`` is called with the folder when all weights are in it, and with the config that it is about to get; what it
    raises keeps the folder from getting its name.
    """
    unfinished = target.with_name(target.name + ".partial")
    with _told_plainly(target, unfinished):
        fingerprint = _fingerprint(plan, tensors, limit)
        require_free(target, force, tensors.checkpoint.folder)
        if _only_marked(target, fingerprint):
            return
        _begin(unfinished, target, plan, fingerprint)
        with _alone(unfinished):
            written = write_weights(plan, tensors, unfinished, progress or (lambda *_: None), limit)
            (unfinished / written[0]).write_text(written[1], encoding="utf-8")
            source = tensors.checkpoint.folder
            folder.copy_files(folder.side_files(source, options), unfinished)
            convert_tokenizer(source, unfinished)
            config = folder.result_config(plan, options)
            if "model_file" in config:
                (unfinished / folder.MODEL_FILE).write_text(folder.SHIM, encoding="utf-8")
            finish(unfinished, config)
            folder.write_json(unfinished / "config.json", config)
            _take_place(unfinished, target)
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


def _take_place(unfinished: Path, target: Path) -> None:
    """Give the finished folder its name; a model that it replaces stays whole until then."""
    if not target.exists() or not any(target.iterdir()):
        os.replace(unfinished, target)
        return
    old = target.with_name(target.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    os.replace(target, old)
    os.replace(unfinished, target)
    shutil.rmtree(old)


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
    text = repr((plan, stamps, limit, mx.__version__))
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
                for rows in pieces(entry, tensors):
                    for target, array in arrays(entry, tensors, rows).items():
                        shard.write(target, array)
                    tensors.checkpoint.release()
                    mx.clear_cache()
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
