"""A folder of safetensors files, read by its headers: names, dtypes and shapes first, numbers only when asked for."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError

ITEM_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
}  # fmt: skip
DTYPES = {  # mlx's; what is not here comes as bytes
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "BOOL": "bool_",
}  # fmt: skip
INDEX = "model.safetensors.index.json"
LARGEST_HEADER = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class TensorInfo:
    file: Path
    dtype: str  # as the header spells it
    shape: tuple[int, ...]
    begin: int = 0  # byte of the file where the numbers begin

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * ITEM_BITS[self.dtype] // 8


def read_header(file: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """The tensors and the metadata of one safetensors file; raises CheckpointError where the file is not whole."""
    try:
        total = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
            if not 2 <= length <= min(LARGEST_HEADER, total - 8):
                raise CheckpointError(
                    f"{file}: not a safetensors file, or cut off inside its header ({total} bytes); download it again"
                )
            header = json.loads(stream.read(length))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise CheckpointError(f"{file}: its header is damaged ({error}); download the file again") from error
    return _parse(file, header, 8 + length, total - 8 - length)


def _parse(file: Path, header: object, start: int, room: int) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: its header is damaged (not a JSON object); download the file again")
    metadata = header.pop("__metadata__", None) or {}
    tensors, spans = {}, []
    for name, entry in header.items():
        try:
            dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            whole = dtype in ITEM_BITS and all(isinstance(n, int) and n >= 0 for n in shape) and 0 <= begin <= end
            info = TensorInfo(file, dtype, shape, start + begin)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{file}: header entry of {name!r} is damaged; download the file again") from error
        if not whole:
            raise CheckpointError(
                f"{file}: tensor {name!r} has dtype {dtype!r} and shape {list(shape)}, which this version cannot read"
            )
        if end - begin != info.nbytes:
            raise CheckpointError(
                f"{file}: tensor {name!r} spans {end - begin} bytes, but {dtype} {list(shape)} needs {info.nbytes}"
            )
        tensors[name] = info
        spans.append((begin, end, name))
    _check_spans(file, sorted(spans), room)
    return tensors, metadata


def _check_spans(file: Path, spans: list[tuple[int, int, str]], room: int) -> None:
    reached = 0
    for begin, end, name in spans:
        if begin < reached:
            raise CheckpointError(
                f"{file}: tensor {name!r} overlaps another one; the file is damaged, download it again"
            )
        if end > room:
            raise CheckpointError(
                f"{file}: cut off: tensor {name!r} ends at byte {end} of the data, the file has {room}; download it again"
            )
        reached = end


def read_json(file: Path, what: str) -> dict:
    """A JSON object from ``file``; raises CheckpointError that calls it ``what``."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{file.parent}: has no {file.name}: {what} needs one") from error
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: holds {type(value).__name__}, expected a JSON object")
    return value


class Checkpoint:
    """The tensors of a model folder, whichever files they lie in."""

    def __init__(self, folder: Path, config: dict | None = None):
        self.folder = folder
        self.config = read_json(folder / "config.json", "a model folder") if config is None else config
        self.tensors: dict[str, TensorInfo] = {}
        self.metadata: list[dict[str, str]] = []  # of each file
        self._open: dict[Path, dict] = {}  # lazy arrays of the files in use
        self._taken: list[str] = []
        for file in self._files():
            tensors, metadata = read_header(file)
            twice = self.tensors.keys() & tensors.keys()
            if twice:
                name = min(twice)
                raise CheckpointError(
                    f"{folder}: tensor {name!r} is in both {self.tensors[name].file.name} and {file.name}"
                )
            self.tensors |= tensors
            self.metadata.append(metadata)
        self._check_index()
        self.is_mlx = self._is_mlx({metadata.get("format") for metadata in self.metadata})

    def _files(self) -> list[Path]:
        files = sorted(self.folder.glob("model*.safetensors"))
        if files:
            return files
        pickles = sorted(self.folder.glob("*.bin")) + sorted(self.folder.glob("*.pt"))
        if pickles:
            raise CheckpointError(
                f"{self.folder}: has only {pickles[0].name}, a pickle, and pickles can run code when read; ask for safetensors files"
            )
        raise CheckpointError(f"{self.folder}: has no model*.safetensors file")

    def _check_index(self) -> None:
        file = self.folder / INDEX
        if not file.exists():
            return
        places = read_json(file, "a sharded model").get("weight_map")
        if not isinstance(places, dict):
            raise CheckpointError(f"{file}: has no weight_map")
        for name, shard in places.items():
            if not isinstance(shard, str) or "/" in shard or "\\" in shard or shard in ("", ".", ".."):
                raise CheckpointError(
                    f"{file}: tensor {name!r} is said to lie in {shard!r}, which is not a file of this folder"
                )
            if name in self.tensors or not shard.startswith("model"):
                continue
            if not (self.folder / shard).exists():
                raise CheckpointError(
                    f"{self.folder}: shard {shard} is missing (tensor {name!r} lies in it); download it again"
                )
            raise CheckpointError(
                f"{self.folder}: {shard} lacks tensor {name!r} that {INDEX} places there; download it again"
            )

    def _is_mlx(self, formats: set) -> bool:
        """Whether the tensors are in MLX layout. Said by the files' metadata, never guessed from shapes."""
        if formats == {"mlx"}:
            return True
        if "mlx" in formats:
            raise CheckpointError(
                f"{self.folder}: some shards are in MLX layout and some are not; they are from different downloads"
            )
        return False

    def read(self, name: str, rows: slice | None = None):
        """One tensor as a lazy array, or some ``rows`` of its first axis, read at once; 8-bit floats come as their bytes."""
        if rows is not None:
            return self.read_ranges(name, 0, [(rows.start, rows.stop)])
        file = self.tensors[name].file
        arrays = self._open.get(file)
        if arrays is None or name not in arrays:
            import mlx.core as mx

            arrays = self._open[file] = mx.load(str(file))
        self._taken.append(name)
        return arrays[name]

    def read_ranges(self, name: str, axis: int, ranges: Sequence[tuple[int, int]]):
        """Some entries of one axis of a tensor, read now and nothing besides; otherwise as :meth:`read`."""
        import mlx.core as mx
        import numpy as np

        info = self.tensors[name]
        kind = np.dtype(f"<u{ITEM_BITS[info.dtype] // 8}")
        try:
            stored = np.memmap(info.file, kind, "r", info.begin, info.shape)
        except ValueError as error:
            raise CheckpointError(f"{info.file}: became shorter while it was read; download it again") from error
        before = (slice(None),) * axis
        parts = np.concatenate([stored[(*before, slice(first, end))] for first, end in ranges], axis=axis)
        return mx.view(mx.array(parts), getattr(mx, DTYPES.get(info.dtype, "uint8")))

    def release(self) -> None:
        """Let go of the arrays that were read, so that they can be freed; files stay open for the rest."""
        for name in self._taken:
            self._open.get(self.tensors[name].file, {}).pop(name, None)
        self._taken.clear()

    def close(self) -> None:
        """Let go of all arrays and files."""
        self._open.clear()
        self._taken.clear()
