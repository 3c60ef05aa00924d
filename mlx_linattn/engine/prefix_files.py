"""Kept prefixes on disk, a file for each node, to survive a restart.

A folder of the user's holds one folder for each model, tokenizer and way to keep context; another model's prefixes are never
looked at. Files are private: they hold what people wrote. What is damaged, or hangs on something that is missing, is left out
with a line in the log, and goes: it is a cache.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import LinAttnError, SessionFileError
from ..session import archive, fingerprint
from ..state import KVOptions, KVPiece
from .prefixes import Node, Prefixes

KIND = archive.Kind("prefix", 1)
log = logging.getLogger(__name__)


class PrefixFolder:
    """Mirrors ``prefixes`` in ``folder``. Raises SessionFileError where that cannot be made."""

    def __init__(self, folder: Path, prefixes: Prefixes, model, tokenizer, options: KVOptions):
        marks = [fingerprint.of_weights(model), fingerprint.of_tokenizer(tokenizer), json.dumps(options.as_dict())]
        self._prefixes = prefixes
        self._folder = folder.expanduser() / hashlib.sha256(" ".join(marks).encode()).hexdigest()[:32]
        self._written: dict[Node, tuple[Path, Any]] = {}  # file, and what it says of the node
        self._failed = False
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise SessionFileError(f"{self._folder}: cannot be made ({error.strerror or error})") from error

    def load(self) -> None:
        """Put what is there back, as far as memory allows."""
        headers = []
        for path in self._folder.glob("*.safetensors"):
            try:
                headers.append((path, archive.read_header(path, KIND)))
            except LinAttnError as error:
                self._discard(path, str(error))
        nodes = {_name(()): self._prefixes.root}
        for path, header in sorted(headers, key=lambda item: item[1].data.get("begin", 0)):
            try:
                parent = nodes.get(header.data["after"])
                size = path.stat().st_size
                if parent is None or header.data["tokens"][0] in parent.children:
                    self._discard(path, f"{path}: what it goes on from is missing")
                elif self._prefixes.nbytes + size > self._prefixes.room:
                    self._discard(path, f"{path}: there is no room for it")
                else:
                    node = self._prefixes.add(parent, *_unpacked(header.data, archive.read_arrays(path, header)))
                    nodes[path.stem] = node
                    self._written[node] = path, _mark(node)
            except (LinAttnError, OSError, RuntimeError, KeyError, TypeError, ValueError, IndexError) as error:
                self._discard(path, str(error))

    def update(self) -> Iterator[None]:
        """Bring the folder up to date; stops after each file, so that the caller can do something else instead."""
        nodes = list(self._prefixes.nodes())
        for node in self._written.keys() - set(nodes):
            path, _ = self._written.pop(node)
            if not any(path == other for other, _ in self._written.values()):
                path.unlink(missing_ok=True)
        for node in nodes:
            if self._failed:
                return
            if node not in self._written or self._written[node][1] != _mark(node):
                try:
                    self._write(node)
                except SessionFileError as error:
                    log.warning("prefixes are not kept on disk any more: %s", error)
                    self._failed = True
                yield

    def _write(self, node: Node) -> None:
        tokens = [token for one in node.path for token in one.tokens]
        path = self._folder / f"{_name(tokens)}.safetensors"
        arrays: dict[str, mx.array] = {}

        def place(some) -> list[str | None]:
            names = [None if array is None else str(len(arrays) + i) for i, array in enumerate(some)]
            arrays.update({name: array for name, array in zip(names, some) if name is not None})
            return names

        data = {
            "begin": node.end - len(node.tokens),
            "after": _name(tokens[: len(tokens) - len(node.tokens)]),
            "tokens": list(node.tokens),
            "used": node.used,
            "pieces": [[place(piece.exact), place(piece.packed), piece.split] for piece in node.pieces],
            "checkpoint": node.checkpoint and [p if isinstance(p, int) else place(p) for p in node.checkpoint],
        }
        archive.write(path, KIND, json.dumps(data), arrays, private=True)
        self._written[node] = path, _mark(node)

    def _discard(self, path: Path, why: str) -> None:
        log.warning("a kept prefix is left out: %s", why)
        path.unlink(missing_ok=True)


def _name(tokens) -> str:
    return hashlib.sha256(np.array(tokens, np.int32).tobytes()).hexdigest()[:40]


def _mark(node: Node) -> tuple[int, bool]:
    return len(node.tokens), node.checkpoint is not None


def _unpacked(data: dict, arrays: dict[str, mx.array]) -> tuple[tuple[int, ...], list[KVPiece], Any, int]:
    def take(names) -> tuple[mx.array | None, ...]:
        return tuple(None if name is None else arrays[name] for name in names)

    pieces = [KVPiece(take(exact), take(packed), split) for exact, packed, split in data["pieces"]]
    parts = data["checkpoint"] and tuple(part if isinstance(part, int) else take(part) for part in data["checkpoint"])
    return tuple(data["tokens"]), pieces, parts, data["used"]
