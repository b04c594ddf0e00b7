"""A registered task: its queue and its counters."""

from __future__ import annotations

from asyncflow_core.ledger.blocks import Block, View
from asyncflow_core.ledger.ready import ReadyQueue
from asyncflow_core.services.data_store import TaskSpec, TaskStats

__all__ = ["Task"]


class Task:
    """A task and the rows it could get.

    Attributes:
        spec: as registered.
        reads: numbers of the columns it reads.
        writes: numbers of the columns it writes.
        members: registrations that share it.
        queue: blocks with rows to hand out.
    """

    __slots__ = (
        "committed",
        "expired",
        "holders",
        "members",
        "queue",
        "reads",
        "ready",
        "spec",
        "writes",
    )  # fmt: skip

    def __init__(
        self, spec: TaskSpec, *, reads: list[int], writes: list[int], max_staleness: int
    ) -> None:
        """A task with one member that has seen nothing."""
        self.spec = spec
        self.reads = reads
        self.writes = writes
        self.members = 1
        self.queue = ReadyQueue(spec.order, max_staleness, spec.batch_groups)
        self.ready = 0
        self.committed = 0
        self.expired = 0
        self.holders: dict[str, int] = {}

    def settle(self, block: Block, view: View, *, front: bool = False) -> bool:
        """Bring the queue in line with the block after any change; True when rows appeared.

        Args:
            block: what changed.
            view: its view by this task.
            front: rows came back: they go before what waits.
        """
        offered = block.ready(view)
        if self.spec.whole_groups:
            # Without the groups of which a row still lacks a column or is leased.
            offered &= ~block.whole(block.alive & ~view.done & ~offered)
        if self.spec.batch_groups and view.leased | view.done:
            self.queue.open(block.batch)
        before, view.offered = view.offered, offered
        self.ready += offered.bit_count() - before.bit_count()
        if not offered:
            if before:
                self.queue.discard(block)
        elif front or not before or self.spec.batch_groups:
            self.queue.push(block, groups=self._groups(block, offered), front=front)
        return bool(offered & ~before)

    def offer_new(self, block: Block, view: View) -> None:
        """`settle` of a new block whose rows are all ready."""
        view.offered = block.alive
        self.ready += view.offered.bit_count()
        self.queue.push(block, groups=self._groups(block, view.offered))

    def _groups(self, block: Block, offered: int) -> int:
        """How many groups are offered, if that is asked."""
        return block.count_groups(offered) if self.spec.batch_groups else 0

    def take(self, block: Block, view: View, mask: int) -> None:
        """`settle` of a block of whose offered rows some, whole groups if need be, are leased."""
        view.offered &= ~mask
        self.ready -= mask.bit_count()
        if not view.offered:
            self.queue.discard(block)

    def hold(self, requester: str, rows: int) -> None:
        """Count rows a requester got (or, negative, holds no more)."""
        held = self.holders.get(requester, 0) + rows
        if held:
            self.holders[requester] = held
        else:
            self.holders.pop(requester, None)

    def stats(self) -> TaskStats:
        """The queue in numbers."""
        return TaskStats(
            ready=self.ready,
            leased=sum(self.holders.values()),
            committed=self.committed,
            expired=self.expired,
            holders=dict(self.holders),
        )
