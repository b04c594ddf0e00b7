"""Rows by number, and what the rows of one put have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncflow_core.errors import DataError
from asyncflow_core.ledger.masks import positions_in, span

__all__ = [
    "MAX_SAMPLES",
    "NO_VERSION",
    "Admission",
    "locate",
    "masks_by_block",
    "row_number",
    "runs_of",
]

_ROW_BITS = 16  # as wide as `sample` in a packed Key
MAX_SAMPLES = 1 << _ROW_BITS
NO_VERSION = -1
"""As an oldest version: the row has no response."""


def row_number(block: int, position: int) -> int:
    """The number of a row: never reused, and its block is found without a table of rows."""
    return block << _ROW_BITS | position


def locate(row: int) -> tuple[int, int]:
    """Block number and position of a row; inverse of `row_number`."""
    return row >> _ROW_BITS, row & (MAX_SAMPLES - 1)


def runs_of(rows: Sequence[int]) -> list[tuple[int, int, int]]:
    """Rows by number as runs, in their order: (block number, first, last excluded)."""
    if not rows:
        return []
    first, count = rows[0], len(rows)
    number, position = locate(first)
    if (
        rows[-1] - first == count - 1
        and position + count <= MAX_SAMPLES
        and (count == 1 or tuple(rows) == tuple(range(first, first + count)))
    ):
        return [(number, position, position + count)]
    runs: list[tuple[int, int, int]] = []
    expected = -1
    for row in rows:
        if row != expected or not row & (MAX_SAMPLES - 1):
            if expected >= 0:
                runs.append((number, position, position + expected - first))
            first = row
            number, position = locate(row)
        expected = row + 1
    runs.append((number, position, position + expected - first))
    return runs


def masks_by_block(runs: Sequence[tuple[int, int, int]]) -> dict[int, int]:
    """Block number to mask, in the order in which blocks first appear; a row twice is an error."""
    masks: dict[int, int] = {}
    for number, first, last in runs:
        mask, rows = masks.get(number, 0), span(first, last)
        twice = mask & rows
        if twice:
            row = row_number(number, next(positions_in(twice)))
            raise DataError(f"row {row} is given twice; name each row once")
        masks[number] = mask | rows
    return masks


@dataclass(frozen=True, slots=True)
class Admission:
    """What the groups of one put have in common.

    Attributes:
        columns: names of the columns they come with.
        samples: rows a group.
        batch: global batch they are admitted to; None outside batches.
        partition: which tasks see them.
        row_bytes: the largest size of one row, reserved.
    """

    columns: tuple[str, ...]
    samples: int = 1
    batch: int | None = None
    partition: str = "train"
    row_bytes: int = 0
