"""How the rows of one put or commit lie in memory: columnar, ragged, never padded.

A *segment* is what one call wrote, in one piece. It begins with int64 [2 * columns]: for each
column where its values and where its offsets begin, in bytes from the segment's start; the first
number is never 0, which says that the segment is gone (see `arena.py`). A ragged column has int64
[rows + 1] offsets in values; an object column is a ragged column of bytes, one msgpack value a row.
A *layout* says what the columns are; many segments share one.
"""

from __future__ import annotations

import itertools
import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import msgpack
import numpy as np
from numpy.typing import NDArray

from asyncflow_core.batch import Batch, Column
from asyncflow_core.errors import DataError

__all__ = ["ColumnLayout", "Layout", "Packed", "Piece", "finish", "join", "pack", "take"]

Bytes = NDArray[np.uint8]
_ALIGN = 64
_INT64 = np.dtype(np.int64)
# Plain dtypes as numpy spells them: no objects, no records.
_DTYPE = re.compile(r"[<>|][biufcSUmMV]\d{1,5}(\[\d{0,5}[a-zA-Z]{1,2}\])?")
_STARTS = struct.Struct("<qq")
_LARGE = 1 << 16
"""Bytes of a segment that nobody should keep for one small column of it."""
_MAX_AXES, _MAX_AXIS = 8, 1 << 40
_LEAVES = frozenset((type(None), bool, int, float, str, bytes))


class ColumnLayout(NamedTuple):
    """One column: its kind, dtype as numpy spells it, and the shape of an entry's elements."""

    name: str
    kind: str
    dtype: str
    tail: tuple[int, ...]

    def __str__(self) -> str:
        """As errors name it."""
        return "object" if self.kind == "object" else f"{self.kind} {self.dtype} {self.tail}"


@dataclass(frozen=True)
class Layout:
    """The columns of a segment, in order."""

    columns: tuple[ColumnLayout, ...]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of the columns."""
        return tuple(column.name for column in self.columns)

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """Name to position."""
        return {column.name: position for position, column in enumerate(self.columns)}

    @cached_property
    def readers(self) -> Sequence[tuple[str, np.dtype[Any], int, tuple[int, ...]]]:
        """Of each column: its kind, dtype, bytes of an entry's elements together, and shape."""
        found = []
        for column in self.columns:
            dtype = np.dtype(column.dtype)
            found.append(
                (column.kind, dtype, math.prod(column.tail, start=dtype.itemsize), column.tail)
            )
        return found

    def dump(self) -> bytes:
        """As bytes; equal for equal layouts."""
        return self._dumped

    @cached_property
    def _dumped(self) -> bytes:
        data: bytes = msgpack.packb(self.columns)
        return data

    @classmethod
    def load(cls, data: bytes) -> Layout:
        """Inverse of `dump`.

        Raises:
            DataError: these bytes are no layout.
        """
        try:
            layout = cls(tuple(map(_column, msgpack.unpackb(data))))
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise DataError(f"a layout of {len(data)} bytes cannot be read: {error}") from error
        if len(layout.positions) < len(layout.columns):
            raise DataError(f"a layout of {len(data)} bytes names a column twice")
        return layout


def _column(fields: Any) -> ColumnLayout:
    match fields:
        case [str(name), "dense" | "ragged" | "object" as kind, str(dtype), [*tail]]:
            sizes = all(type(axis) is int and 0 <= axis < _MAX_AXIS for axis in tail)
            if sizes and len(tail) < _MAX_AXES and _DTYPE.fullmatch(dtype):
                return ColumnLayout(name, kind, np.dtype(dtype).str, tuple(tail))
    raise ValueError(f"{fields!r:.80} is no column")


class Packed(NamedTuple):
    """A batch ready to be copied: its first bytes, where each array goes, and the room all take."""

    layout: Layout
    nbytes: int
    starts: bytes
    parts: list[tuple[int, NDArray[Any]]]

    def write(self, target: Bytes) -> None:
        """Copy everything; the only copy on the way in, but of a few rows, which are put together.

        There, what takes time is how often numpy is called.
        """
        if self.nbytes >= _LARGE:
            target[: len(self.starts)] = np.frombuffer(self.starts, np.uint8)
            for start, array in self.parts:
                target[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
            return
        pieces, at = [self.starts], len(self.starts)
        for start, array in self.parts:
            if start > at:
                pieces.append(bytes(start - at))
            pieces.append(array.tobytes())
            at = start + array.nbytes
        pieces.append(bytes(self.nbytes - at))
        target.data[:] = b"".join(pieces)


def pack(batch: Batch) -> Packed:
    """Lay out a batch. Nothing is copied but object columns, which are encoded.

    Raises:
        DataError: a column that nobody could read as it was: objects that no message can hold,
            offsets that do not rise within its values, an element type without a name of its own.
    """
    starts = [0] * (2 * len(batch))
    parts: list[tuple[int, NDArray[Any]]] = []
    columns: list[tuple[Any, ...]] = []
    end = 8 * len(starts)
    at = 0
    for name, column in batch.items():
        values, offsets = column.values, column.offsets
        if isinstance(values, list):
            kind = "object"
            values, offsets = _objects(name, values)
        elif offsets is None:
            kind = "dense"
        else:
            kind = "ragged"
            values, offsets = _from_zero(name, values, offsets)
        columns.append((name, kind, values.dtype, values.shape[1:]))
        if offsets is not None:
            starts[at + 1] = end
            parts.append((end, offsets))
            end += offsets.nbytes
        end = -(-end // _ALIGN) * _ALIGN
        starts[at] = end
        at += 2
        nbytes = values.nbytes
        if nbytes:
            parts.append((end, values))
        end += -(-nbytes // 8) * 8
    data = struct.pack(f"<{at}q", *starts)
    return Packed(_layout(tuple(columns)), -(-end // _ALIGN) * _ALIGN, data, parts)


@lru_cache(256)
def _layout(columns: tuple[tuple[Any, ...], ...]) -> Layout:
    """One object for equal ones: most batches have the columns of the last."""
    for name, _, dtype, _ in columns:
        if np.dtype(dtype.str) != dtype:
            raise DataError(
                f"column {name!r} has the dtype {dtype}, which cannot be stored; allowed are plain "
                f"numbers and text: put a record's fields into columns of their own, and bfloat16 "
                f"in as uint16"
            )
    layout = Layout(
        tuple([ColumnLayout(name, kind, dtype.str, tail) for name, kind, dtype, tail in columns])
    )
    try:
        layout.dump()
    except ValueError as error:
        names = [name for name, *_ in columns]
        raise DataError(f"columns of the names {names} cannot be stored: {error}") from error
    return layout


def _from_zero(
    name: str, values: NDArray[Any], offsets: NDArray[np.int64]
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Only the values of its rows, and offsets from 0."""
    if offsets.dtype != _INT64:
        offsets = offsets.astype(np.int64)
    first, last = offsets.item(0), offsets.item(-1)
    if not 0 <= first <= last <= len(values) or (
        len(offsets) > 2 and (offsets[1:] < offsets[:-1]).any()
    ):
        raise DataError(
            f"column {name!r} has offsets from {first} to {last} for {len(values)} values; they "
            f"rise, row by row, within them"
        )
    return (values[first:last], offsets - first) if first else (values, offsets)


def _objects(name: str, entries: Sequence[Any]) -> tuple[Bytes, NDArray[np.int64]]:
    packer = msgpack.Packer(default=_plain)
    try:
        packed = [packer.pack(entry) for entry in entries]
        for entry, data in zip(entries, packed, strict=True):
            if type(entry) not in _LEAVES:  # it may hold what packs and cannot be read, as a key
                msgpack.unpackb(data, strict_map_key=False)
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise DataError(f"column {name!r} holds an object that cannot be stored: {error}") from (
            error
        )
    offsets = np.zeros(len(packed) + 1, np.int64)
    np.cumsum([len(data) for data in packed], out=offsets[1:])
    return np.frombuffer(b"".join(packed), np.uint8), offsets


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not allowed, plain values and arrays are")


class Piece(NamedTuple):
    """Rows `first` to `last` (excluded) of a segment of `rows` rows, which lies in `data`.

    `repeat` above 1 stands for the single row `first` so many times: rows of one prompt group.
    """

    data: Bytes
    layout: Layout
    rows: int
    first: int
    last: int
    repeat: int = 1


def _fresh(nbytes: int) -> Bytes:
    return np.empty(nbytes, np.uint8)


def take(
    pieces: Sequence[Piece], names: Sequence[str], room: Callable[[int], Bytes] = _fresh
) -> dict[str, Column]:
    """Columns of rows out of segments, one after another, copied into what `room` gives.

    Raises:
        DataError: a segment has no such column.
    """
    if len(pieces) == 1 and _is_whole(pieces[0], names):
        return _take_whole(pieces[0], names, room)
    return {name: finish(*join(pieces, name, room)) for name in names}


def _is_whole(piece: Piece, names: Sequence[str]) -> bool:
    return (
        (piece.first, piece.last, piece.repeat) == (0, piece.rows, 1)
        and piece.layout.positions.keys() == set(names)
    )  # fmt: skip


def _take_whole(
    piece: Piece, names: Sequence[str], room: Callable[[int], Bytes]
) -> dict[str, Column]:
    """Columns of a whole segment, out of one copy of it."""
    small = len(piece.data) < _LARGE
    if small:
        memory: Bytes = np.frombuffer(bytearray(piece.data), np.uint8)
    else:
        memory = room(len(piece.data))
        memory[:] = piece.data
    copied = Piece(memory, piece.layout, piece.rows, 0, piece.rows)
    found = {}
    for name in names:
        kind, values, offsets = _part(copied, name)
        if offsets is not None and offsets.item(0):
            offsets = offsets - offsets.item(0)
        # Who keeps a small column keeps no large segment with it.
        if not small and 4 * values.nbytes < len(memory):
            values = values.copy()
            offsets = None if offsets is None else offsets.copy()
        elif not values.flags.aligned:
            values = values.copy()
        found[name] = Column(values, offsets) if kind != "object" else finish(kind, values, offsets)
    return found


def join(
    pieces: Sequence[Piece], name: str, room: Callable[[int], Bytes] = _fresh
) -> tuple[str, NDArray[Any], NDArray[np.int64] | None]:
    """Kind, values and offsets of a column, copied; what an object is stays unknown."""
    found: list[NDArray[Any]] = []
    parts: list[NDArray[np.int64]] = []
    kind = ""
    for piece in pieces:
        kind, values, offsets = _part(piece, name)
        found.extend([values] * piece.repeat)
        if offsets is not None:
            parts.extend([offsets] * piece.repeat)
    if not found:
        raise DataError(f"no rows were asked of column {name!r}")
    like = found[0]
    memory = room(sum(part.nbytes for part in found)).view(like.dtype)
    values = memory.reshape(sum(map(len, found)), *like.shape[1:])
    np.concatenate(found, out=values)
    if not parts:
        return kind, values, None
    if len(parts) == 1:
        return kind, values, parts[0] - parts[0][0]
    offsets = np.zeros(sum(len(part) - 1 for part in parts) + 1, np.int64)
    np.cumsum(np.concatenate([np.diff(part) for part in parts]), out=offsets[1:])
    return kind, values, offsets


def _part(
    piece: Piece, name: str
) -> tuple[str, NDArray[Any], NDArray[np.int64] | None]:  # fmt: skip
    """Kind of a column, the values of a piece's rows, and the offsets around them; views."""
    position = piece.layout.positions.get(name)
    if position is None:
        raise DataError(f"a segment of {list(piece.layout.positions)} has no column {name!r}")
    kind, dtype, size, tail = piece.layout.readers[position]
    data, first, last = piece.data, piece.first, piece.last
    try:
        values_at, offsets_at = _STARTS.unpack_from(data.data, 16 * position)
        offsets: NDArray[np.int64] | None = None
        if kind == "dense":
            start, end = first, last
        else:
            offsets = np.frombuffer(data, _INT64, last - first + 1, offsets_at + 8 * first)
            start, end = offsets.item(0), offsets.item(-1)
        count = (end - start) * size
        if not count:  # `frombuffer` takes no empty buffer
            return kind, np.empty((end - start, *tail), dtype), offsets
        count //= dtype.itemsize
        values: NDArray[Any] = np.frombuffer(data, dtype, count, values_at + start * size)
        if tail:
            values = values.reshape(end - start, *tail)
    except (ValueError, OverflowError, struct.error) as error:
        raise DataError(
            f"column {name!r} ({piece.layout.columns[position]}) of a segment of "
            f"{len(data)} bytes and {piece.rows} rows cannot be read: {error}"
        ) from error
    return kind, values, offsets


def finish(kind: str, values: NDArray[Any], offsets: NDArray[np.int64] | None) -> Column:
    """The column of what `join` found."""
    if kind != "object":
        return Column(values, offsets)
    assert offsets is not None
    view = values.data
    ends = offsets.tolist()
    try:
        return Column(
            [
                msgpack.unpackb(view[start:end], strict_map_key=False)
                for start, end in itertools.pairwise(ends)
            ]
        )
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise DataError(f"an object of a segment cannot be read: {error}") from error
