"""Writing a safetensors file tensor by tensor: its header is known beforehand, so that no more than one tensor is in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import mlx.core as mx

from mlx_linattn.weights.checkpoint import INDEX, ITEM_BITS

from .plan import Output

LIMIT = 5 << 30  # bytes a file, as mlx_lm's


def shard_name(index: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


class ShardWriter:
    """``with ShardWriter(...) as shard: shard.write(name, array)`` for each output, in any order, whole or in pieces.

    The file appears under its name when all of it is on disk, never before.
    """

    def __init__(self, file: Path, outputs: Iterable[Output], metadata: dict[str, str]):
        self.file, self.unfinished = file, file.with_name(file.name + ".part")
        # Wide dtypes first, so that every tensor is aligned to its items.
        ordered = sorted(outputs, key=lambda output: -ITEM_BITS[output.dtype])
        header: dict[str, object] = {"__metadata__": metadata}
        self._places: dict[str, tuple[int, int]] = {}
        offset = 0
        for output in ordered:
            end = offset + output.nbytes
            header[output.name] = {"dtype": output.dtype, "shape": output.shape, "data_offsets": [offset, end]}
            self._places[output.name] = (offset, end)
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._header = len(text).to_bytes(8, "little") + text

    def __enter__(self) -> ShardWriter:
        self._stream = self.unfinished.open("wb")
        self._stream.write(self._header)
        return self

    def write(self, name: str, array: mx.array) -> None:
        """Append to the tensor ``name``, which may come in pieces along its first axis."""
        begin, end = self._places[name]
        # Scalars cannot be viewed as bytes.
        data = memoryview(mx.contiguous(array.reshape(-1)).view(mx.uint8)) if array.size else b""
        if len(data) > end - begin:
            raise AssertionError(f"{name}: {len(data)} bytes where {end - begin} are left")
        self._stream.seek(len(self._header) + begin)
        self._stream.write(data)
        self._places[name] = (begin + len(data), end)

    def __exit__(self, kind, *_) -> None:
        with self._stream as stream:
            if kind is None:
                missing = [name for name, (begin, end) in self._places.items() if begin != end]
                if missing:
                    raise AssertionError(f"{self.file}: {missing} were not written whole")
                stream.flush()
                os.fsync(stream.fileno())
        if kind is None:
            os.replace(self.unfinished, self.file)


def index(shards: list[tuple[str, Iterable[Output]]], parameters: int) -> tuple[str, str]:
    """File name and text of the index of sharded weights, as mlx_lm writes it."""
    places, total = {}, 0
    for file, outputs in shards:
        for output in outputs:
            places[output.name] = file
            total += output.nbytes
    metadata = {"total_size": total, "total_parameters": parameters}
    text = json.dumps({"metadata": metadata, "weight_map": dict(sorted(places.items()))}, indent=4)
    return INDEX, text
