"""One safetensors file whose header also holds JSON, with digests of both: written at once or not at all. No pickle.

A file is written beside the old one and takes its place in one step: a crash leaves the one or the other.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from ..errors import SessionFileError

LARGEST_HEADER = 100_000_000
PIECE = 1 << 24
DTYPES = {
    mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16", mx.uint32: "U32", mx.int32: "I32", mx.uint8: "U8",
    mx.int64: "I64", mx.bool_: "BOOL",
}  # fmt: skip
RAW = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


@dataclass(frozen=True)
class Kind:
    """What is in such files: ``name`` is the key of their JSON, and what messages call them."""

    name: str
    version: int

    @property
    def format(self) -> str:
        return f"mlx_linattn.{self.name}"


@dataclass(frozen=True)
class Header:
    data: dict  # the JSON
    entries: dict  # safetensors' own, of every array
    digest: str  # of the arrays
    begin: int  # where their bytes begin


def write(path: Path, kind: Kind, text: str, arrays: dict[str, mx.array], private: bool = False) -> None:
    """Write ``text`` (JSON) and ``arrays`` to ``path``. ``private``: for nobody else to read. Raises SessionFileError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        _remove_strays(path)
        with open(temporary, "wb", opener=_private if private else None) as file:
            _write(file, kind, text, arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise SessionFileError(f"{path}: cannot be written ({error.strerror or error})") from error
    finally:
        temporary.unlink(missing_ok=True)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _write(file, kind: Kind, text: str, arrays: dict[str, mx.array]) -> None:
    entries, at = {}, 0
    for name, array in arrays.items():
        entries[name] = {"dtype": DTYPES[array.dtype], "shape": array.shape, "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    metadata = {
        "format": kind.format, "version": str(kind.version), kind.name: text, f"{kind.name}_digest": _digest(kind.version, text),
    }  # fmt: skip
    digest = _data_digest(entries)
    blank = "0" * len(digest.hexdigest())

    def header(data_digest: str) -> bytes:
        return json.dumps({"__metadata__": {**metadata, "data_digest": data_digest}, **entries}).encode()

    first = header(blank)
    first += b" " * (-len(first) % 8)
    file.write(struct.pack("<Q", len(first)) + first)
    for array in arrays.values():  # one after the other, so that no second copy of all of them exists
        # numpy knows no bfloat16, so the bytes go by an integer type of the same width
        data = memoryview(np.array(mx.contiguous(array).view(RAW[array.itemsize]))).cast("B") if array.size else b""
        digest.update(data)
        file.write(data)
    file.seek(8)
    file.write(header(digest.hexdigest()))


def _remove_strays(path: Path) -> None:
    """Half-written files of processes that are gone."""
    for stray in path.parent.glob(f".{path.name}.*.partial"):
        with suppress(ValueError, OSError):
            try:
                os.kill(int(stray.name.split(".")[-2]), 0)
            except ProcessLookupError:
                stray.unlink()


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # not every system can
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _digest(version: int, text: str) -> str:
    return hashlib.sha256(f"{version} {text}".encode()).hexdigest()


def _data_digest(entries: dict):
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode())


def read_header(path: Path, kind: Kind) -> Header:
    """Raises SessionFileError."""
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            header = file.read(length) if 2 <= length <= LARGEST_HEADER else b""
    except OSError as error:
        raise SessionFileError(f"{path}: cannot be read ({error.strerror or error})") from error
    try:
        entries = json.loads(header)
        metadata = entries.pop("__metadata__")
        found, version = metadata["format"], int(metadata["version"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SessionFileError(
            f"{path}: is not a {kind.name} file, or is cut off or damaged at its beginning"
        ) from error
    if found != kind.format:
        raise SessionFileError(f"{path}: is not a {kind.name} file (its format is {found!r}, expected {kind.format!r})")
    if version > kind.version:
        raise SessionFileError(
            f"{path}: was written by a newer version of mlx_linattn (file version {version}, this one reads up to {kind.version}); update it"
        )
    text, digest = metadata.get(kind.name), metadata.get(f"{kind.name}_digest")
    if not isinstance(text, str) or _digest(version, text) != digest:
        raise SessionFileError(f"{path}: its header is damaged: what it says does not match its digest")
    return Header(json.loads(text), entries, metadata.get("data_digest", ""), 8 + length)


def read_arrays(path: Path, header: Header) -> dict[str, mx.array]:
    """Raises SessionFileError where they are damaged, and what MLX raises."""
    digest = _data_digest(header.entries)
    with path.open("rb") as file:
        file.seek(header.begin)
        while piece := file.read(PIECE):
            digest.update(piece)
    if digest.hexdigest() != header.digest:
        raise SessionFileError(f"{path}: its state is cut off or damaged (digest does not match)")
    arrays = mx.load(str(path), format="safetensors") if header.entries else {}
    mx.eval(arrays)
    return arrays
