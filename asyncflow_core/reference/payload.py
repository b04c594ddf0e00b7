"""The entries of a store's rows: what a prompt group shares once, the rest by the row.

Arrays are copied in and out, so no row pins a caller's buffer and no caller can change a row.
Objects (dicts, lists, strings) are kept as they are: hand them over and leave them alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from asyncflow_core.batch import Batch, Column
from asyncflow_core.errors import DataError
from asyncflow_core.ledger import locate

__all__ = ["Payload"]

_OBJECT_BYTES = 64  # as Column.nbytes estimates


class _Layout(NamedTuple):
    """What all rows of a column have in common: what is needed to join entries to a column."""

    kind: Literal["dense", "ragged", "object"]
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, column: Column) -> _Layout:
        if column.kind == "object":
            return cls("object", "", ())
        return cls(column.kind, column.array.dtype.str, column.array.shape[1:])

    def join(self, entries: list[Any]) -> Column:
        if self.kind == "object":
            return Column.objects(entries)
        if self.kind == "ragged" and entries:
            return Column.ragged(entries)
        values = np.asarray(entries, self.dtype).reshape(len(entries), *self.shape)
        if self.kind == "dense":
            return Column.dense(values)
        return Column(values, np.zeros(1, np.int64))

    def __str__(self) -> str:
        return "object" if self.kind == "object" else f"{self.kind} {self.dtype} {self.shape}"


@dataclass(slots=True)
class _GroupData:
    shared: dict[str, Any]
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)  # sample to entries


class Payload:
    """Entries by row and column. Every column has one layout, that of its first rows.

    Batches written have passed `agree`.

    Attributes:
        nbytes: of all entries; an object counts 64.
    """

    def __init__(self) -> None:
        """No rows."""
        self.nbytes = 0
        self._layouts: dict[str, _Layout] = {}
        self._groups: dict[int, _GroupData] = {}

    def agree(self, batch: Batch) -> None:
        """Fix the layout of new columns; `DataError` when one differs from its earlier rows."""
        layouts = {name: _Layout.of(column) for name, column in batch.items()}
        for name, layout in layouts.items():
            known = self._layouts.get(name, layout)
            if layout != known:
                raise DataError(
                    f"column {name!r} is {layout}, but earlier rows are {known}; "
                    f"a column has one layout"
                )
        self._layouts.update(layouts)

    def add_group(self, number: int, batch: Batch, position: int, samples: int) -> None:
        """Keep row `position` of `batch` as what the rows of a new group share."""
        shared = self._entries(batch, position)
        self._groups[number] = _GroupData(shared, {sample: {} for sample in range(samples)})

    def write(self, row: int, batch: Batch, position: int) -> None:
        """Keep row `position` of `batch` as columns of a living row."""
        number, sample = locate(row)
        self._groups[number].rows[sample].update(self._entries(batch, position))

    def has(self, row: int, column: str) -> bool:
        """Whether a living row has the column."""
        number, sample = locate(row)
        group = self._groups[number]
        return column in group.shared or column in group.rows[sample]

    def read(self, rows: Sequence[int], columns: Sequence[str]) -> Batch:
        """These columns, which the rows have, in the order of `rows`."""
        joined = {}
        for name in columns:
            joined[name] = self._layouts[name].join([self._entry(row, name) for row in rows])
        return Batch(joined, rows=len(rows))

    def free(self, row: int) -> None:
        """Forget a row, and what its group shares with the last one."""
        number, sample = locate(row)
        group = self._groups[number]
        self.nbytes -= _nbytes(group.rows.pop(sample))
        if not group.rows:
            self.nbytes -= _nbytes(self._groups.pop(number).shared)

    def _entry(self, row: int, column: str) -> Any:
        number, sample = locate(row)
        group = self._groups[number]
        own = group.rows[sample]
        return own[column] if column in own else group.shared[column]

    def _entries(self, batch: Batch, position: int) -> dict[str, Any]:
        entries = {}
        for name, column in batch.items():
            entry = column[position]
            entries[name] = entry.copy() if column.kind != "object" else entry
        self.nbytes += _nbytes(entries)
        return entries


def _nbytes(entries: Mapping[str, Any]) -> int:
    """Bytes of one row's entries: arrays and numpy scalars know theirs."""
    return sum(
        entry.nbytes if isinstance(entry, np.ndarray | np.generic) else _OBJECT_BYTES
        for entry in entries.values()
    )
