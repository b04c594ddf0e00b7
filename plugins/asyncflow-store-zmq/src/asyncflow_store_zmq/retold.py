"""Acts of an earlier life, done again in a table that is being made anew; see `history.py`. Pure.

Unlike the acts of this life they need no lease, wait for no room and refuse nothing: they were
answered.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from asyncflow_core.ledger import Admission, Block
from asyncflow_store_zmq.extents import Segment
from asyncflow_store_zmq.incoming import key_runs

if TYPE_CHECKING:
    from asyncflow_store_zmq.table import Table

__all__ = ["block_again", "commit_again", "put_again"]


def put_again(
    table: Table,
    segment: Segment | None,
    keys: NDArray[np.int64],
    admission: Admission,
    tokens: array[int],
    oldest: array[int],
    entries: Sequence[int],
) -> None:
    """Groups that were stored; without a segment, their payload is gone."""
    plan = table.payload.plan(admission.partition, table.tasks())
    intake = table.ledger.intake(admission)
    for start, key, count in key_runs(keys):
        done = 0
        while done < count:
            first, entry = start + done, entries[start + done]
            last = first + 1
            limit = first + min(count - done, intake.most)
            while last < limit and entries[last] == entry + last - first:
                last += 1
            place = table.payload.add_block(segment, entry, plan, last - first)
            begin = key._replace(sequence=key.sequence + done)
            intake.put(begin, tokens[first:last], oldest[first:last], place)
            done += last - first


def commit_again(
    table: Table,
    name: str,
    rows: Sequence[int],
    segment: Segment | None,
    entries: Sequence[int],
    tokens: Sequence[int],
    oldest: Sequence[int],
    version: int | None,
) -> None:
    """Rows that a task was done with, and where the columns that it wrote lie."""
    task = table.task(name)
    if segment is not None:
        table.record(task, rows, entries, segment)
    table.note_trained(task, rows, version)
    table.note_generated(task, rows, tokens, version)
    table.ledger.redo(name, rows, tokens=tokens, oldest=oldest)
    table.follow(0.0)


def block_again(
    table: Table,
    block: Block,
    alive: int,
    kept: int,
    done: Mapping[str, int],
    trained: dict[int, int],
    made: dict[int, int],
    tokens: array[int],
) -> None:
    """A block of a snapshot: rows that live, and rows kept for a checkpoint."""
    table.ledger.adopt(block)
    if made:
        table.lineage.made[block.number], table.lineage.tokens[block.number] = made, tokens
    if trained:
        table.retained.trained[block.number] = trained
    if kept:
        table.retained.kept[block.number] = block, kept
    if alive:
        table.ledger.revive(block, alive, done)
    table.follow(0.0)
