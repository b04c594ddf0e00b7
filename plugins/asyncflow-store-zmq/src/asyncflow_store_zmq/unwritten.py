"""Rows whose columns were promised and never written. Pure.

Who puts or commits rows promises that their columns lie in memory by then. Nobody looks there
before a reader does, and to that one they are as a lost lease; they would be handed out for ever.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncflow_core.batch import BatchRef
from asyncflow_core.ledger import locate
from asyncflow_store_zmq.extents import Segment
from asyncflow_store_zmq.table import Table

__all__ = ["UNWRITTEN", "drop_unwritten"]

UNWRITTEN = "its columns were promised and never written"
"""Why they are dropped."""


def drop_unwritten(
    table: Table, now: float, ref: BatchRef, is_there: Callable[[Segment], bool]
) -> int:
    """Drop those rows of a lease that its holder cannot read since they are not there.

    Args:
        table: of the store.
        now: the time.
        ref: rows that somebody could not read.
        is_there: whether something was written at the start of a segment.

    Returns:
        How many.

    Raises:
        LeaseLostError: the lease does not hold them, so others may have overwritten them.
    """
    claim = table.inspect(now, ref)
    rows = [locate(ref.rows[position]) for position in claim.held]
    blocks = {number: table.ledger.block(number) for number, _ in rows}
    gone = [
        blocks[number].key_at(row)
        for number, row in rows
        if not all(map(is_there, table.payload.segments_of(blocks[number], row)))
    ]
    return table.drop(now, gone, UNWRITTEN) if gone else 0
