"""A registered task: its queue and its counters."""

from __future__ import annotations

from asyncflow_core.ledger.ready import ReadyQueue
from asyncflow_core.ledger.rows import Group, View
from asyncflow_core.services.data_store import TaskSpec, TaskStats

__all__ = ["Task"]


class Task:
    """A task and the rows it could get.

    Attributes:
        spec: as registered.
        reads: numbers of the columns it reads.
        writes: numbers of the columns it writes.
        members: registrations that share it.
        queue: groups with rows to hand out.
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

    def settle(self, group: Group, view: View, *, front: bool = False) -> bool:
        """Bring the queue in line with the group after any change; True when rows appeared.

        Args:
            group: what changed.
            view: its view by this task.
            front: rows came back: they go before what waits.
        """
        offered = group.ready(view)
        if self.spec.whole_groups and offered != group.alive & ~view.done:
            offered = 0  # a row is still missing a column or leased
        if self.spec.batch_groups and view.leased | view.done:
            self.queue.open(group.batch)
        before, view.offered = view.offered, offered
        self.ready += offered.bit_count() - before.bit_count()
        if not offered:
            if before:
                self.queue.discard(group)
        elif front or not before:
            self.queue.push(group, front=front)
        return bool(offered & ~before)

    def offer_new(self, group: Group, view: View, mask: int) -> None:
        """`settle` of a new group whose rows in `mask`, all of them, are ready."""
        view.offered = mask
        self.ready += mask.bit_count()
        self.queue.push(group)

    def take_all(self, view: View) -> None:
        """`settle` of a group out of the queue, all of whose offered rows were leased."""
        self.ready -= view.offered.bit_count()
        view.offered = 0

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
