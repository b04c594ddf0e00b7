"""Rows in columns: what services take and return.

A `Batch` holds equally long columns. A `Column` is

- dense: `values` [B, ...], one fixed-size entry a row;
- ragged: `values` [T, ...] of all rows one after another, `offsets` int64 [B + 1]; never padded;
- object: `values` a list of B entries (str, int, float, bool, None, bytes, list, dict).

A `Key` names a row for good: (source, epoch, sequence, sample). Shape letters: B rows, T values of
all rows together.
"""

from __future__ import annotations

import struct
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from asyncflow_core.errors import DataError

__all__ = ["Batch", "BatchRef", "Column", "GroupKey", "Key"]

Array = NDArray[Any]
T = TypeVar("T")
_PACKED_KEY = struct.Struct("<HIQH")


class GroupKey(NamedTuple):
    """A prompt group: all samples of one prompt. `source` numbers the prompt sources of a run.

    From 0 on; a source has 16 bits, an epoch 32, a sequence 62. Not every store takes more.
    """

    source: int
    epoch: int
    sequence: int


class Key(NamedTuple):
    """A row for good: the `sample`-th trajectory of a prompt group; a sample has 16 bits."""

    source: int
    epoch: int
    sequence: int
    sample: int

    @property
    def group(self) -> GroupKey:
        """The prompt group this row belongs to."""
        return GroupKey(self.source, self.epoch, self.sequence)

    def pack(self) -> bytes:
        """16 bytes, equal for equal keys in every process."""
        return _PACKED_KEY.pack(*self)

    @classmethod
    def unpack(cls, data: bytes) -> Key:
        """Inverse of `pack`."""
        if len(data) != _PACKED_KEY.size:
            raise DataError(f"a packed key has {_PACKED_KEY.size} bytes, got {len(data)}")
        return cls(*_PACKED_KEY.unpack(data))

    def __str__(self) -> str:
        """`source/epoch/sequence/sample`, as errors and files name it."""
        return f"{self.source}/{self.epoch}/{self.sequence}/{self.sample}"


def _exact(values: Any, dtype: Any) -> Array:
    """An array of `dtype`; numbers that an integer type cannot hold are refused, not changed."""
    array = np.asarray(values)
    if dtype is None or array.dtype == dtype:
        return array
    with np.errstate(over="ignore", invalid="ignore"):  # infinite is seen where values are checked
        made = array.astype(dtype)
    if made.dtype.kind in "iu" and not np.array_equal(made, array):
        wrong = np.atleast_1d(array)[np.atleast_1d(made != array)][0]
        raise DataError(f"{wrong} is not a whole number that {made.dtype} holds")
    return made


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """One field of a batch; build with `dense`, `ragged` or `objects`.

    Attributes:
        values: dense [B, ...] or ragged [T, ...] array, or a list of B objects.
        offsets: int64 [B + 1] for a ragged column, else None.
    """

    values: Array | list[Any]
    offsets: NDArray[np.int64] | None = None

    @classmethod
    def dense(cls, values: Any, dtype: Any = None) -> Column:
        """One fixed-size entry a row; the first axis counts rows."""
        array = _exact(values, dtype)
        if array.ndim == 0 or array.dtype.hasobject:
            raise DataError(
                f"a dense column is an array with a row axis and a plain dtype, "
                f"got shape {array.shape}, dtype {array.dtype}; use Column.objects for objects"
            )
        return cls(array)

    @classmethod
    def ragged(cls, rows: Sequence[Any], dtype: Any = None) -> Column:
        """One array of its own length a row; `dtype` is needed when there are no rows."""
        arrays = [_exact(row, dtype) for row in rows]
        offsets = np.zeros(len(arrays) + 1, np.int64)
        if not arrays:
            return cls(np.empty(0, dtype or np.float32), offsets)
        np.cumsum([len(array) for array in arrays], out=offsets[1:])
        return cls(np.concatenate(arrays), offsets)

    @classmethod
    def objects(cls, rows: Iterable[Any]) -> Column:
        """Any msgpack-able entry a row."""
        return cls(list(rows))

    @property
    def kind(self) -> Literal["dense", "ragged", "object"]:
        """How rows lie in `values`."""
        if self.offsets is not None:
            return "ragged"
        return "object" if isinstance(self.values, list) else "dense"

    @property
    def array(self) -> Array:
        """`values` of a dense or ragged column; `DataError` for an object column."""
        if isinstance(self.values, list):
            raise DataError("an object column has no array; iterate over its rows")
        return self.values

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Entries of each row of a ragged column, int64 [B]."""
        if self.offsets is None:
            raise DataError(f"only a ragged column has lengths, this one is {self.kind}")
        lengths: NDArray[np.int64] = self.offsets[1:] - self.offsets[:-1]
        return lengths

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays; an object column counts 64 an entry, an estimate."""
        if isinstance(self.values, list):
            return 64 * len(self.values)
        return int(self.values.nbytes)

    def __len__(self) -> int:
        """Rows."""
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    def __getitem__(self, row: int) -> Any:
        """The entry of one row: an array view (dense rows with axes, ragged), scalar or object."""
        if self.offsets is None:
            return self.values[row]
        if row < 0:
            row += len(self)
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of a column of {len(self)} rows")
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[Any]:
        """The entries, row by row."""
        return (self[row] for row in range(len(self)))

    def take(self, rows: Sequence[int] | NDArray[np.int64]) -> Column:
        """A new column of these rows, in this order."""
        if self.offsets is not None:
            if not len(rows):  # `ragged` could not know the further axes of rows that are not there
                return Column(self.array[:0], np.zeros(1, np.int64))
            return Column.ragged([self[int(row)] for row in rows], dtype=self.array.dtype)
        if isinstance(self.values, list):
            return Column([self.values[int(row)] for row in rows])
        return Column(self.values[np.asarray(rows, np.int64)])

    @staticmethod
    def concat(columns: Sequence[Column]) -> Column:
        """The rows of all, one after another; `DataError` when their kinds differ."""
        kinds = {column.kind for column in columns}
        if len(kinds) != 1:
            raise DataError(f"cannot join columns of kinds {sorted(kinds)}; one kind is allowed")
        if "object" in kinds:
            return Column([entry for column in columns for entry in column.values])
        values = np.concatenate([column.array for column in columns])
        if "dense" in kinds:
            return Column(values)
        offsets = np.zeros(sum(len(column) for column in columns) + 1, np.int64)
        np.cumsum(np.concatenate([column.lengths for column in columns]), out=offsets[1:])
        return Column(values, offsets)


class Batch(Mapping[str, Column]):
    """Equally long named columns, immutable; `len(batch.columns)` names, `batch.rows` rows."""

    __slots__ = ("_columns", "rows")

    def __init__(self, columns: Mapping[str, Column], *, rows: int | None = None) -> None:
        """Take the columns.

        Args:
            columns: name to column, equally long.
            rows: how many rows; needed only when there is no column.

        Raises:
            DataError: the columns differ in length.
        """
        self._columns = dict(columns)
        found = self._columns.values()
        self.rows: int = len(next(iter(found), ())) if rows is None else rows
        for column in found:
            if len(column) != self.rows:
                wrong = {name: len(c) for name, c in columns.items() if len(c) != self.rows}
                raise DataError(f"all columns of a batch have {self.rows} rows, but got {wrong}")

    def __getitem__(self, name: str) -> Column:
        """The column; `KeyError` names the columns there are."""
        try:
            return self._columns[name]
        except KeyError:
            raise KeyError(f"no column {name!r} (there are: {sorted(self._columns)})") from None

    def __iter__(self) -> Iterator[str]:
        """Column names."""
        return iter(self._columns)

    def __len__(self) -> int:
        """How many columns, as a mapping; rows are `rows`."""
        return len(self._columns)

    # A `Mapping` has these, but each of them asks `__getitem__`, which is slow to miss.

    def __contains__(self, name: object) -> bool:
        """Whether there is such a column."""
        return name in self._columns

    @overload
    def get(self, name: str) -> Column | None: ...
    @overload
    def get(self, name: str, default: Column | T) -> Column | T: ...
    def get(self, name: str, default: Any = None) -> Any:
        """The column, or the default."""
        return self._columns.get(name, default)

    def items(self) -> ItemsView[str, Column]:
        """Names and columns."""
        return self._columns.items()

    def __repr__(self) -> str:
        """Rows, names and dtypes, without values."""
        parts = [
            f"{name}: {c.kind}" + ("" if c.kind == "object" else f" {c.array.dtype}")
            for name, c in self._columns.items()
        ]
        return f"Batch({self.rows} rows, {', '.join(parts)})"

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(column.nbytes for column in self._columns.values())

    def select(self, names: Iterable[str]) -> Batch:
        """Only these columns."""
        return Batch({name: self[name] for name in names}, rows=self.rows)

    def take(self, rows: Sequence[int] | NDArray[np.int64]) -> Batch:
        """Only these rows, in this order."""
        return Batch({n: c.take(rows) for n, c in self._columns.items()}, rows=len(rows))

    def with_columns(self, columns: Mapping[str, Column]) -> Batch:
        """These columns added or put in the place of those of the same name."""
        return Batch({**self._columns, **columns}, rows=self.rows)

    def row(self, row: int) -> dict[str, Any]:
        """One row as name to entry."""
        return {name: column[row] for name, column in self._columns.items()}

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """The rows of all; `DataError` when their column names differ."""
        if not batches:
            return Batch({})
        names = set(batches[0])
        for batch in batches[1:]:
            if set(batch) != names:
                raise DataError(f"cannot join batches of columns {sorted(names)} / {sorted(batch)}")
        joined = {name: Column.concat([batch[name] for batch in batches]) for name in batches[0]}
        return Batch(joined, rows=sum(batch.rows for batch in batches))


@dataclass(frozen=True, slots=True)
class BatchRef:
    """Rows by reference: what a lease handed out, for whoever reads them from the store.

    Attributes:
        lease_id: the lease that holds the rows.
        fence: the hand-out number; a read after the lease is lost is refused by it.
        rows: row numbers in the store, in the order in which they are to be read.
    """

    lease_id: int
    fence: int
    rows: tuple[int, ...]
