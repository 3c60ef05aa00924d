"""Sessions on disk: one safetensors file, with everything that is not an array as JSON in its header. No pickle.

    header    format, version; "session": messages, tokens, options, fingerprints, which array belongs where; two digests
    arrays    the state, and the recurrent arrays of the latest checkpoints at messages

The header alone is enough for the messages, so they survive whatever happens to the arrays behind it. A file is written
beside the old one and takes its place in one step: a crash leaves the one or the other.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import mlx.core as mx
import numpy as np

from ..errors import RequestError, SessionFileError
from ..state import ModelState
from .timeline import Checkpoint, Timeline

FORMAT, VERSION = "mlx_linattn.session", 1
CHECKPOINTS = 4  # latest ones that are kept, besides the first; each is as large as the recurrent state
LARGEST_HEADER = 100_000_000
PIECE = 1 << 24
DTYPES = {
    mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16", mx.uint32: "U32", mx.int32: "I32", mx.uint8: "U8",
    mx.int64: "I64", mx.bool_: "BOOL",
}  # fmt: skip
RAW = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


def write(path: str | Path, session: dict, timeline: Timeline) -> None:
    """Write ``session`` (what JSON can hold) and its timeline to ``path``, at once or not at all."""
    path = Path(path).expanduser()
    arrays: dict[str, mx.array] = {}
    names: dict[int, str] = {}  # arrays that checkpoints share are written once

    def place(name: str, parts: Iterable[mx.array | None] | int) -> list[str | None] | int:
        if isinstance(parts, int):
            return parts
        found: list[str | None] = []
        for i, array in enumerate(parts):
            if array is not None and id(array) not in names:
                names[id(array)] = f"{name}.{i}"
                arrays[f"{name}.{i}"] = array
            found.append(None if array is None else names[id(array)])
        return found

    kept = _worth_keeping(timeline)
    state, *snapshots = timeline.state.dump([one.snapshot for one in kept])
    session = {
        **session,
        "tokens": timeline.tokens,
        "state": [place(f"state.{i}", part) for i, part in enumerate(state)],
        "checkpoints": [
            {
                "position": one.position,
                "layers": [place(f"checkpoint.{one.position}.{i}", part) for i, part in enumerate(layers)],
            }
            for one, layers in zip(kept, snapshots)
        ],
    }
    try:
        text = json.dumps(session)
    except (TypeError, ValueError) as error:
        raise RequestError(f"a message or template argument cannot be written as JSON: {error}") from error
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        _remove_strays(path)
        with temporary.open("wb") as file:
            _write(file, text, arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise SessionFileError(f"{path}: cannot be written ({error.strerror or error})") from error
    finally:
        temporary.unlink(missing_ok=True)


def _worth_keeping(timeline: Timeline) -> list[Checkpoint]:
    boundaries = [one for one in timeline.checkpoints if one.boundary and timeline.state.reaches(one.snapshot)]
    return boundaries[:1] + boundaries[1:][-CHECKPOINTS:]


def _write(file, text: str, arrays: dict[str, mx.array]) -> None:
    entries, at = {}, 0
    for name, array in arrays.items():
        entries[name] = {"dtype": DTYPES[array.dtype], "shape": array.shape, "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    metadata = {"format": FORMAT, "version": str(VERSION), "session": text, "session_digest": _digest(VERSION, text)}
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


def read_session(path: str | Path) -> dict:
    """What the header of a session file holds: messages and the rest, no arrays. Raises SessionFileError."""
    return _read_header(Path(path).expanduser())[0]


def _read_header(path: Path) -> tuple[dict, dict, str, int]:
    """The session, the arrays' entries, the digest of their bytes, and where those begin."""
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
        kind, version = metadata["format"], int(metadata["version"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SessionFileError(f"{path}: is not a session file, or is cut off or damaged at its beginning") from error
    if kind != FORMAT:
        raise SessionFileError(f"{path}: is not a session file (its format is {kind!r}, expected {FORMAT!r})")
    if version > VERSION:
        raise SessionFileError(
            f"{path}: was written by a newer version of mlx_linattn (file version {version}, this one reads up to {VERSION}); update it"
        )
    text, digest = metadata.get("session"), metadata.get("session_digest")
    if not isinstance(text, str) or _digest(version, text) != digest:
        raise SessionFileError(f"{path}: its header is damaged: the messages do not match their digest")
    return json.loads(text), entries, metadata.get("data_digest", ""), 8 + length


def read_timeline(path: str | Path, state: ModelState, room: int) -> Timeline:
    """The timeline of a session file, in ``state``, which is empty and of the right model. Raises SessionFileError."""
    path = Path(path).expanduser()
    session, entries, expected, begin = _read_header(path)
    keep = "its messages are whole: load it with state=False to keep them"
    try:
        digest = _data_digest(entries)
        with path.open("rb") as file:
            file.seek(begin)
            while piece := file.read(PIECE):
                digest.update(piece)
        if digest.hexdigest() != expected:
            raise SessionFileError(f"{path}: its state is cut off or damaged (digest does not match); {keep}")
        arrays = mx.load(str(path), format="safetensors") if entries else {}
        mx.eval(arrays)
        return _rebuild(session, arrays, state, room)
    except SessionFileError:
        raise
    except (OSError, RuntimeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise SessionFileError(f"{path}: its state cannot be read ({error}); {keep}") from error


def _rebuild(session: dict, arrays: dict, state: ModelState, room: int) -> Timeline:
    def take(names) -> list[mx.array | None] | int:
        return names if isinstance(names, int) else [None if name is None else arrays[name] for name in names]

    timeline = Timeline(state, room)
    timeline.tokens = [int(token) for token in session["tokens"]]
    length = len(timeline.tokens)
    if len(session["state"]) != len(state):
        raise ValueError(f"it has {len(session['state'])} layers, the model {len(state)}")
    if length:
        moments = [session["state"], *(one["layers"] for one in session["checkpoints"])]
        parts = [[take(names) for names in layers] for layers in moments]
        found = state.load(parts, length, [one["position"] for one in session["checkpoints"]])
        timeline.checkpoints = [Checkpoint(snapshot, True) for snapshot in found]
    return timeline
