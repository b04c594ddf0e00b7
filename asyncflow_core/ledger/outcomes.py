"""What the ledger's acts lead to, as values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncflow_core.ledger.blocks import Block
from asyncflow_core.ledger.masks import positions_in
from asyncflow_core.ledger.rows import row_number
from asyncflow_core.services.data_store import TaskSpec

__all__ = ["Claim", "Effects", "Grant"]


@dataclass(slots=True)
class Effects:
    """What happened since the shell last asked.

    Attributes:
        ready: tasks whose queue got rows, or that ended: whoever waits for them tries again.
        gone: blocks with the rows of theirs that are gone; their payload and credit are free. A
            block may be there several times, a row once.
        groups_dropped: the log of dropped groups grew.
    """

    ready: set[str] = field(default_factory=set)
    gone: list[tuple[Block, int]] = field(default_factory=list)
    groups_dropped: bool = False

    @property
    def freed(self) -> list[int]:
        """The rows of `gone` by number."""
        return [
            row_number(block.number, row) for block, mask in self.gone for row in positions_in(mask)
        ]


class Claim(NamedTuple):
    """What a lease's reference stands for now.

    Attributes:
        task: whose lease it is.
        held: positions in the reference of rows the lease holds; the others were committed by it
            before, or dropped.
    """

    task: TaskSpec
    held: Sequence[int]


class Grant(NamedTuple):
    """A hand-out.

    Attributes:
        lease_id: of the new lease; its fence too.
        task: whose it is.
        picks: blocks with rows handed out, in order; a block may be there several times.
    """

    lease_id: int
    task: TaskSpec
    picks: list[tuple[Block, int]]
