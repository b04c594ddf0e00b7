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
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    parts: list[tuple[int, NDArray[Any]]]

    def write(self, target: Bytes) -> None:
        """Copy everything; the only copy on the way in, but of a few rows, which are put together.

        There, what takes time is how often numpy is called.
        """
        if self.nbytes < _LARGE:
            target[:] = np.frombuffer(b"".join(self._pieces()), np.uint8)
            return
        for start, array in self.parts:
            target[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)

    def _pieces(self) -> Iterator[bytes]:
        at = 0
        for start, array in self.parts:
            yield bytes(start - at)
            yield array.tobytes()
            at = start + array.nbytes
        yield bytes(self.nbytes - at)


def pack(batch: Batch) -> Packed:
    """Lay out a batch. Nothing is copied but object columns, which are encoded.

    Raises:
        DataError: an object column holds what no message can hold.
    """
    starts = [0] * (2 * len(batch))
    parts: list[tuple[int, NDArray[Any]]] = []
    columns: list[tuple[Any, ...]] = []
    end = 8 * len(starts)
    for number, (name, column) in enumerate(batch.items()):
        values, offsets = _arrays(name, column)
        columns.append(_form(name, column))
        if offsets is not None:
            starts[2 * number + 1] = end
            parts.append((end, offsets))
            end += offsets.nbytes
        end = -(-end // _ALIGN) * _ALIGN
        starts[2 * number] = end
        if values.nbytes:
            parts.append((end, values))
        end += -(-values.nbytes // 8) * 8
    parts.insert(0, (0, np.array(starts, np.int64)))
    return Packed(_layout(tuple(columns)), -(-end // _ALIGN) * _ALIGN, parts)


def _form(name: str, column: Column) -> tuple[Any, ...]:
    """What a `ColumnLayout` is made of."""
    values = column.values
    if isinstance(values, list):
        return name, "object", "|u1", ()
    kind = "dense" if column.offsets is None else "ragged"
    return name, kind, values.dtype.str, values.shape[1:]


@lru_cache(256)
def _layout(columns: tuple[tuple[Any, ...], ...]) -> Layout:
    """One object for equal ones: most batches have the columns of the last."""
    return Layout(tuple([ColumnLayout(*column) for column in columns]))


_dtype = lru_cache(256)(np.dtype)


def _arrays(name: str, column: Column) -> tuple[NDArray[Any], NDArray[np.int64] | None]:
    """Values in one piece, and offsets from 0."""
    if isinstance(column.values, list):
        return _objects(name, column.values)
    array = column.values
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    if column.offsets is None:
        return array, None
    offsets = column.offsets
    if offsets.dtype != _INT64 or not offsets.flags.c_contiguous:
        offsets = np.ascontiguousarray(offsets, np.int64)
    if offsets[0]:
        array, offsets = array[offsets[0] : offsets[-1]], offsets - offsets[0]
    return array, offsets


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
    if len(pieces) == 1 and _is_whole(pieces[0], names):
        return {name: finish(*part) for name, part in _parts(pieces[0], names, room)}
    return {name: finish(*join(pieces, name, room)) for name in names}


def _is_whole(piece: Piece, names: Sequence[str]) -> bool:
    return (
        (piece.first, piece.last, piece.repeat) == (0, piece.rows, 1)
        and piece.layout.positions.keys() == set(names)
    )  # fmt: skip


def _parts(
    piece: Piece, names: Sequence[str], room: Callable[[int], Bytes]
) -> Iterator[tuple[str, tuple[str, NDArray[Any], NDArray[np.int64] | None]]]:
    """Columns of a whole segment, out of one copy of it."""
    if len(piece.data) < _LARGE:
        memory: Bytes = np.frombuffer(bytearray(piece.data), np.uint8)
    else:
        memory = room(len(piece.data))
        memory[:] = piece.data
    copied = Piece(memory, piece.layout, piece.rows, 0, piece.rows)
    for name in names:
        kind, values, offsets = _part(copied, name)
        if offsets is not None and len(offsets) and offsets[0]:
            offsets = offsets - offsets[0]
        # Who keeps a small column keeps no large segment with it.
        if len(memory) >= _LARGE and 4 * values.nbytes < len(memory):
            values = values.copy()
            offsets = None if offsets is None else offsets.copy()
        elif not values.flags.aligned:
            values = values.copy()
        yield name, (kind, values, offsets)


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
    """Kind, values and offsets of a column of a piece; views."""
    position = piece.layout.positions.get(name)
    if position is None:
        raise DataError(f"a segment of {list(piece.layout.positions)} has no column {name!r}")
    layout = piece.layout.columns[position]
    try:
        values, offsets = _cut(piece, position, layout)
    except (ValueError, OverflowError, struct.error) as error:
        raise DataError(
            f"column {name!r} ({layout}) of a segment of {len(piece.data)} bytes and "
            f"{piece.rows} rows cannot be read: {error}"
        ) from error
    return layout.kind, values, offsets


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
    values_at, offsets_at = _STARTS.unpack_from(data.data, 16 * position)
    dtype = _dtype(layout.dtype)
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
