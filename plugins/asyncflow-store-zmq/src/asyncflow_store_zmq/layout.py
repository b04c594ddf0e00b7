"""How the rows of one put or commit lie in memory: columnar, ragged, never padded.

A *segment* is what one call wrote, in one piece. It begins with int64 [2 * columns]: for each
column where its values and where its offsets begin, in bytes from the segment's start; the first
number is never 0, which says that the segment is gone (see `arena.py`). A ragged column has int64
[rows + 1] offsets in values; an object column is a ragged column of bytes, one msgpack value a row.
A *layout* says what the columns are; many segments share one.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
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
_MAX_AXES, _MAX_AXIS = 8, 1 << 40


class ColumnLayout(NamedTuple):
    """One column: its kind, dtype as numpy spells it, and the shape of an entry's elements."""

    name: str
    kind: str
    dtype: str
    tail: tuple[int, ...]

    @classmethod
    def of(cls, name: str, column: Column) -> ColumnLayout:
        """As this column is."""
        if column.kind == "object":
            return cls(name, "object", "|u1", ())
        return cls(name, column.kind, column.array.dtype.str, column.array.shape[1:])

    def __str__(self) -> str:
        """As errors name it."""
        return "object" if self.kind == "object" else f"{self.kind} {self.dtype} {self.tail}"


@dataclass(frozen=True)
class Layout:
    """The columns of a segment, in order."""

    columns: tuple[ColumnLayout, ...]

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """Name to position."""
        return {column.name: position for position, column in enumerate(self.columns)}

    def dump(self) -> bytes:
        """As bytes; equal for equal layouts."""
        data: bytes = msgpack.packb(self.columns)
        return data

    @classmethod
    def load(cls, data: bytes) -> Layout:
        """Inverse of `dump`.

        Raises:
            DataError: these bytes are no layout.
        """
        try:
            columns = tuple(map(_column, msgpack.unpackb(data)))
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise DataError(f"a layout of {len(data)} bytes cannot be read: {error}") from error
        return cls(columns)


def _column(fields: Any) -> ColumnLayout:
    match fields:
        case [str(name), "dense" | "ragged" | "object" as kind, str(dtype), [*tail]]:
            sizes = all(type(axis) is int and 0 <= axis < _MAX_AXIS for axis in tail)
            if sizes and len(tail) < _MAX_AXES and _DTYPE.fullmatch(dtype):
                return ColumnLayout(name, kind, np.dtype(dtype).str, tuple(tail))
    raise ValueError(f"{fields!r:.80} is no column")


class Packed(NamedTuple):
    """A batch ready to be copied: where each array goes, and how much room all take."""

    layout: Layout
    nbytes: int
    parts: list[tuple[int, Bytes]]

    def write(self, target: Bytes) -> None:
        """Copy everything; the only copy on the way in."""
        for start, data in self.parts:
            target[start : start + data.nbytes] = data


def pack(batch: Batch) -> Packed:
    """Lay out a batch. Nothing is copied but object columns, which are encoded.

    Raises:
        DataError: an object column holds what no message can hold.
    """
    starts = np.zeros(2 * len(batch), np.int64)
    parts: list[tuple[int, Bytes]] = [(0, starts.view(np.uint8))]
    columns = []
    end = starts.nbytes
    for number, (name, column) in enumerate(batch.items()):
        columns.append(ColumnLayout.of(name, column))
        values, offsets = _arrays(name, column)
        if offsets is not None:
            starts[2 * number + 1] = end
            parts.append((end, offsets.view(np.uint8)))
            end += offsets.nbytes
        end = -(-end // _ALIGN) * _ALIGN
        starts[2 * number] = end
        if values.nbytes:
            parts.append((end, values))
        end += -(-values.nbytes // 8) * 8
    return Packed(Layout(tuple(columns)), -(-end // _ALIGN) * _ALIGN, parts)


def _arrays(name: str, column: Column) -> tuple[Bytes, NDArray[np.int64] | None]:
    """Values as bytes, and offsets from 0."""
    if isinstance(column.values, list):
        return _objects(name, column.values)
    array = np.ascontiguousarray(column.values)
    if column.offsets is None:
        return array.reshape(-1).view(np.uint8), None
    offsets = np.ascontiguousarray(column.offsets, np.int64)
    if offsets[0]:
        array, offsets = array[offsets[0] : offsets[-1]], offsets - offsets[0]
    return array.reshape(-1).view(np.uint8), offsets


def _objects(name: str, entries: Sequence[Any]) -> tuple[Bytes, NDArray[np.int64]]:
    packer = msgpack.Packer(default=_plain)
    try:
        packed = [packer.pack(entry) for entry in entries]
    except (ValueError, TypeError, OverflowError) as error:
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
    return {name: finish(*join(pieces, name, room)) for name in names}


def join(
    pieces: Sequence[Piece], name: str, room: Callable[[int], Bytes] = _fresh
) -> tuple[str, NDArray[Any], NDArray[np.int64] | None]:
    """Kind, values and offsets of a column, copied; what an object is stays unknown."""
    found: list[NDArray[Any]] = []
    parts: list[NDArray[np.int64]] = []
    kind = ""
    for piece in pieces:
        position = piece.layout.positions.get(name)
        if position is None:
            raise DataError(f"a segment of {list(piece.layout.positions)} has no column {name!r}")
        layout = piece.layout.columns[position]
        kind = layout.kind
        try:
            values, offsets = _cut(piece, position, layout)
        except (ValueError, OverflowError) as error:
            raise DataError(
                f"column {name!r} ({layout}) of a segment of {len(piece.data)} bytes and "
                f"{piece.rows} rows cannot be read: {error}"
            ) from error
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


def _cut(
    piece: Piece, position: int, layout: ColumnLayout
) -> tuple[NDArray[Any], NDArray[np.int64] | None]:
    """The values of a piece's rows, and the offsets around them; views."""
    data, first, last = piece.data, piece.first, piece.last
    values_at, offsets_at = np.frombuffer(data, _INT64, 2, 16 * position).tolist()
    dtype = np.dtype(layout.dtype)
    width = 1
    for axis in layout.tail:
        width *= axis
    offsets: NDArray[np.int64] | None = None
    if layout.kind == "dense":
        start, end = first, last
    else:
        offsets = np.frombuffer(data, _INT64, last - first + 1, offsets_at + 8 * first)
        start, end = int(offsets[0]), int(offsets[-1])
    count = (end - start) * width
    if not count:  # `frombuffer` takes no empty buffer
        return np.empty((end - start, *layout.tail), dtype), offsets
    values = np.frombuffer(data, dtype, count, values_at + start * width * dtype.itemsize)
    return values.reshape(end - start, *layout.tail) if layout.tail else values, offsets
