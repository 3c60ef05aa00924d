from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..errors import RequestError, StateError
from ..ops.columns import Columns
from .span import Span


@dataclass(frozen=True)
class KVQuantization:
    """Tokens from position ``start`` on are stored in ``bits`` bits, ``group_size`` features to a scale.

    How a token is stored depends on its position alone, so a state that went back and read on equals a fresh one.
    """

    bits: int
    group_size: int
    start: int

    def pack(self, x: mx.array) -> tuple[mx.array, ...]:
        if x.shape[-1] % self.group_size:
            fitting = [size for size in (128, 64, 32) if x.shape[-1] % size == 0]
            advice = f"use kv_group_size={fitting[0]}" if fitting else "this model's cache cannot be quantized"
            raise RequestError(
                f"kv_group_size {self.group_size} does not divide a head's {x.shape[-1]} features: {advice}"
            )
        return tuple(mx.quantize(x, self.group_size, self.bits))


class KVState:
    """What an attention layer keeps of every token (keys and values; or latents), in buffers that grow by half their size.

    So growth costs O(1) a token. A snapshot is a length: what lies before it is never written again, unless the state goes back first.
    """

    FIRST = 256  # columns of the first buffer; capacities are multiples of it

    def __init__(self) -> None:
        self.exact: list[mx.array] = []  # [B, heads, capacity, D] each
        self.packed: list[
            tuple[mx.array, ...]
        ] = []  # the same in integers, scales and biases, from quantization.start on
        self.length = 0  # columns in use
        self.quantization: KVQuantization | None = None
        self._reserved = 0

    def append(self, span: Span, *new: mx.array):
        """Store [B, heads, T, D] arrays; returns the columns of each from 0 on, and what :func:`ops.attention` must know about them."""
        end = max(span.starts) + span.T
        if self.quantization is None:
            self.exact = self._store(self.exact, new, span.places, end, self._reserved)
            columns, mask = [buffer[:, :, :end] for buffer in self.exact], span.mask(span.starts, end)
        else:
            self._append_quantized(span, new, end)
            columns, mask = [self._columns(i, end) for i in range(len(new))], None
        self.length = end
        return columns, {"starts": span.starts, "mask": mask}

    def _append_quantized(self, span: Span, new, end: int) -> None:
        first, places = self.quantization.start, span.places
        if isinstance(places, int):
            cut = min(max(0, first - places), span.T)
            head, tail = [x[:, :, :cut] for x in new], [x[:, :, cut:] for x in new]
            exact = places, min(end, first)
            packed = max(0, places - first), end - first
        else:  # what a row does not store among the exact columns, or among the packed ones, goes to one behind those in use
            head = tail = new
            exact = mx.where(places < first, places, min(end, first)), min(end, first) + 1
            packed = mx.where(places < first, end - first, places - first), end - first + 1
        if min(span.starts) < first:
            self.exact = self._store(self.exact, head, *exact, min(self._reserved, first))
        if end > first:
            old, tail = self.packed or [()] * len(new), [self.quantization.pack(x) for x in tail]
            self.packed = [tuple(self._store(a, b, *packed, self._reserved - first)) for a, b in zip(old, tail)]

    def _columns(self, i: int, end: int) -> Columns:
        first = self.quantization.start
        exact = self.exact[i][:, :, : min(end, first)] if self.exact else None
        packed = tuple(x[:, :, : end - first] for x in self.packed[i]) if end > first else ()
        return Columns(exact, packed, self.quantization.group_size, self.quantization.bits)

    def _store(self, buffers, new, places, end, reserved) -> list[mx.array]:
        """The buffers with ``new`` at ``places``: the first column, or [B, T] columns; ``end`` of them are in use then."""
        buffers = buffers or [None] * len(new)
        buffers = [self._room(buffer, x, end, reserved) for buffer, x in zip(buffers, new)]
        if isinstance(places, int):
            return [put(buffer, x, places) for buffer, x in zip(buffers, new)]
        places = places[:, None, :, None]
        return [mx.put_along_axis(buffer, mx.broadcast_to(places, x.shape), x, 2) for buffer, x in zip(buffers, new)]

    def _room(self, buffer, new, end, reserved):
        have = 0 if buffer is None else buffer.shape[2]
        if have >= end:
            return buffer
        larger = mx.zeros((*new.shape[:2], self._capacity(have, end, reserved), new.shape[3]), new.dtype)
        return larger if buffer is None else put(larger, buffer, 0)

    def _capacity(self, have: int, end: int, reserved: int) -> int:
        return have if have >= end else self._rounded(max(end, have + have // 2, reserved))

    def _rounded(self, columns: int) -> int:
        return max(1, -(-columns // self.FIRST)) * self.FIRST

    def reserve(self, columns: int) -> None:
        """When the buffers grow next, let them hold ``columns`` tokens at once."""
        self._reserved = columns

    @property
    def state(self) -> list[mx.array]:
        return [*self.exact, *(array for triple in self.packed for array in triple)]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.state)

    def nbytes_with(self, tokens: int) -> int:
        """Bytes that will be held once ``tokens`` tokens are stored, room for more included; known after the first token."""
        quantization = self.quantization
        if quantization is None:
            return sum(self._grown(array, tokens, self._reserved) for array in self.exact)
        first = quantization.start
        exact = sum(self._grown(array, min(tokens, first), min(self._reserved, first)) for array in self.exact)
        reserved = self._reserved - first
        if self.packed:
            arrays = [array for triple in self.packed for array in triple]
            return exact + sum(self._grown(array, tokens - first, reserved) for array in arrays)
        later = sum(self._grown(array[:, :, :0], tokens - first, reserved, array) for array in self.exact)
        scales = 2 * 8 * self.exact[0].itemsize / quantization.group_size  # a scale and a bias for each group
        return exact + int(later * (quantization.bits + scales) / (8 * self.exact[0].itemsize))

    def _grown(self, buffer, tokens, reserved, like=None) -> int:
        like = buffer if like is None else like
        return like.nbytes // like.shape[2] * self._capacity(buffer.shape[2], tokens, reserved)

    def reset(self) -> None:
        self.exact, self.packed = [], []
        self.length = self._reserved = 0

    def fork(self) -> KVState:
        """Another state with the same buffers; whichever of the two writes first gets a copy of its own (MLX sees to that)."""
        twin = copy.copy(self)
        twin.exact, twin.packed = list(self.exact), list(self.packed)
        return twin

    def snapshot(self) -> Any:
        return self.length

    def restore(self, snapshot: Any) -> None:
        if snapshot > self.length:
            raise StateError(f"cannot restore a cache of {self.length} tokens to {snapshot}: it can only go back")
        if not snapshot:
            self.reset()
        self.length = snapshot
        self._reserved = 0
        exact, packed = self._split(snapshot)
        self.exact = [self._shrunk(buffer, exact) for buffer in self.exact]
        self.packed = [tuple(self._shrunk(x, packed) for x in triple) for triple in self.packed] if packed else []

    def _split(self, length: int) -> tuple[int, int]:
        """How many of ``length`` columns are exact, and how many packed."""
        first = self.quantization.start if self.quantization else length
        return min(length, first), max(0, length - first)

    @property
    def layout(self) -> tuple:
        """What two states have in common whose rows can be kept in one: everything but the numbers of rows and columns."""
        arrays = self.exact or [array for triple in self.packed for array in triple]
        return tuple((array.shape[1], array.shape[3], array.dtype) for array in arrays)

    def take(self, rows: list[int], length: int) -> KVState:
        """Another state that holds these rows, the longest of which has read ``length`` tokens; no larger than it must be."""
        twin, index = self.fork(), mx.array(rows)
        exact, packed = self._split(length)

        def taken(buffer, columns):
            return mx.take(buffer[:, :, : self._rounded(columns)], index, axis=0)

        twin.exact = [taken(buffer, exact) for buffer in self.exact]
        twin.packed = [tuple(taken(x, packed) for x in triple) for triple in self.packed] if packed else []
        twin.length, twin._reserved = length, 0
        return twin

    def join(self, others: list[KVState]) -> KVState:
        """Another state that holds our rows and then the rows of ``others``."""
        twin, states = self.fork(), [self, *others]
        twin.reset()
        twin.length = max(one.length for one in states)
        exact, packed = self._split(twin.length)
        rows = [one.state[0].shape[0] for one in states]
        twin.exact = [self._stacked(part, rows, exact) for part in zip(*(one.exact for one in states))]
        if packed:
            absent = [(None,) * 3] * max(len(one.packed) for one in states)
            triples = zip(*(one.packed or absent for one in states))
            twin.packed = [tuple(self._stacked(part, rows, packed) for part in zip(*triple)) for triple in triples]
        return twin

    def _stacked(self, buffers, rows: list[int], columns: int) -> mx.array:
        """One buffer of ``columns`` for all rows; a missing part (None) has not come that far."""
        like, width = next(buffer for buffer in buffers if buffer is not None), self._rounded(columns)
        result, row = mx.zeros((sum(rows), like.shape[1], width, like.shape[3]), like.dtype), 0
        for buffer, count in zip(buffers, rows):
            if buffer is not None:
                result = mx.slice_update(result, buffer[:, :, :width], mx.array([row]), (0,))
            row += count
        return result

    def _shrunk(self, buffer, used: int):
        """A buffer that is mostly empty gives its memory back."""
        if buffer.shape[2] <= max(4 * self.FIRST, 4 * used):
            return buffer
        kept = self._rounded(2 * used)
        smaller = mx.zeros((*buffer.shape[:2], kept, buffer.shape[3]), buffer.dtype)
        return put(smaller, buffer[:, :, :kept], 0)  # a slice alone would hold all of it

    def dump(self) -> list[mx.array | None]:
        """What a file has to keep: the columns in use."""
        exact, packed = self._split(self.length)
        return [
            *(array[:, :, :exact] for array in self.exact),
            *(array[:, :, :packed] for triple in self.packed for array in triple),
        ]

    def cut(self, begin: int, end: int) -> KVPiece:
        """The columns ``begin`` to ``end``, in memory of their own."""
        packed = tuple(array for triple in self.packed for array in triple)
        return KVPiece(tuple(self.exact), packed, self.quantization.start if self.quantization else end).cut(begin, end)

    def load(self, arrays: list[mx.array | None], length: int) -> None:
        """The reverse of :meth:`dump`, after ``length`` tokens."""
        quantization = self.quantization
        packed = arrays
        self.exact = []
        if quantization is None or quantization.start:
            count = len(arrays) if quantization is None or length <= quantization.start else len(arrays) // 4
            self.exact, packed = list(arrays[:count]), arrays[count:]
        self.packed = [tuple(packed[i : i + 3]) for i in range(0, len(packed), 3)]
        self.length = length


@dataclass(frozen=True)
class KVPiece:
    """Columns of a :class:`KVState` as they are stored."""

    exact: tuple[mx.array, ...]
    packed: tuple[mx.array, ...]  # integers, scales and biases in turn
    split: int  # how many of the columns are exact

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return (*self.exact, *self.packed)

    def cut(self, begin: int, end: int) -> KVPiece:
        """Some of these columns, copied."""
        split = self.split
        exact = tuple(_copied(array, begin, min(end, split)) for array in self.exact) if begin < split else ()
        packed = (
            tuple(_copied(array, max(0, begin - split), end - split) for array in self.packed) if end > split else ()
        )
        return KVPiece(exact, packed, max(0, min(end, split) - begin))

    @staticmethod
    def join(pieces: Sequence[KVPiece]) -> list[mx.array]:
        """What :meth:`KVState.load` takes of a state that was cut into ``pieces``."""
        kinds = ([piece.exact for piece in pieces if piece.exact], [piece.packed for piece in pieces if piece.packed])
        return [mx.concatenate(arrays, axis=2) for kind in kinds for arrays in zip(*kind)]


def _copied(array: mx.array, begin: int, end: int) -> mx.array:
    """Columns in memory of their own: a slice alone would hold all the others too."""
    own = mx.zeros((*array.shape[:2], end - begin, array.shape[3]), array.dtype)
    return put(own, array[:, :, begin:end], 0)


def put(buffer: mx.array, x: mx.array, first: int) -> mx.array:
    """``buffer`` with ``x`` in its columns from ``first`` on, in the same memory where nobody else holds the old one."""
    if x.shape[2] == buffer.shape[2]:  # an assignment would yield x itself, with the memory that it is a part of
        return mx.slice_update(buffer, x, mx.array([0]), (2,))
    result = buffer[...]  # another name of it: what is assigned to the one does not show in the other
    result[:, :, first : first + x.shape[2]] = x
    return result
