"""Leases: who holds which rows, until when, and what ended leases did."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable

from asyncflow_core.batch import BatchRef
from asyncflow_core.errors import LeaseLostError
from asyncflow_core.ledger.tasks import Task

__all__ = ["LeaseBook", "LeaseRecord", "Part"]


class Part:
    """The rows of one block in a lease, as masks. Rows in none of them were given back."""

    __slots__ = ("committed", "dropped", "held")

    def __init__(self, held: int) -> None:
        """All of them held."""
        self.held = held
        self.committed = 0
        self.dropped = 0


class LeaseRecord:
    """One hand-out.

    Attributes:
        lease_id: counts hand-outs over the whole store, so it is the fencing number too.
        task: whose rows they are.
        requester: who holds them.
        expires: when, on the ledger's clock.
        rows: rows handed out.
        held: rows not yet committed, dropped or given back.
        lost: it ended by expiry or with its task, not by its holder's acts.
        parts: block number to rows, in the order of the hand-out.
    """

    __slots__ = ("expires", "held", "lease_id", "lost", "parts", "requester", "rows", "task")

    def __init__(self, lease_id: int, task: Task, requester: str, expires: float) -> None:
        """A lease of nothing yet."""
        self.lease_id = lease_id
        self.task = task
        self.requester = requester
        self.expires = expires
        self.rows = 0
        self.held = 0
        self.lost = False
        self.parts: dict[int, Part] = {}


class LeaseBook:
    """Live leases by deadline, and the last ended ones.

    An ended lease is remembered, so that a commit repeated after it is recognised, until the
    leases that ended after it handed out `remember_rows` rows together. Later than that a repeat
    is refused like any commit of a lost lease.
    """

    def __init__(self, *, remember_rows: int, first: int = 0) -> None:
        """An empty book, whose leases are numbered from above `first`."""
        self.live: dict[int, LeaseRecord] = {}
        self._remember_rows = remember_rows
        self._ended: OrderedDict[int, LeaseRecord] = OrderedDict()
        self._ended_rows = 0
        self._deadlines: list[tuple[float, int]] = []  # never later than the lease's `expires`
        self._last_id = first

    def open(self, task: Task, requester: str, expires: float) -> LeaseRecord:
        """A new lease."""
        self._last_id += 1
        lease = LeaseRecord(self._last_id, task, requester, expires)
        self.live[lease.lease_id] = lease
        if len(self._deadlines) > 2 * len(self.live) + 64:  # mostly of ended leases
            self._deadlines = [(lease.expires, number) for number, lease in self.live.items()]
            heapq.heapify(self._deadlines)
        else:
            heapq.heappush(self._deadlines, (expires, lease.lease_id))
        return lease

    def end(self, lease: LeaseRecord) -> None:
        """The lease holds nothing any more; remember what it did."""
        del self.live[lease.lease_id]
        self._ended[lease.lease_id] = lease
        self._ended_rows += lease.rows
        while self._ended_rows - lease.rows > self._remember_rows:
            self._ended_rows -= self._ended.popitem(last=False)[1].rows

    def get(self, lease_id: int) -> LeaseRecord | None:
        """A live or remembered lease."""
        return self.live.get(lease_id) or self._ended.get(lease_id)

    def find(self, ref: BatchRef, masks: dict[int, int]) -> LeaseRecord:
        """The lease of a reference, all of whose rows it holds, committed or lost to a drop.

        Raises:
            LeaseLostError: the lease or one of the rows is not (or no longer) the caller's.
        """
        lease = self.get(ref.lease_id)
        if lease is None or ref.fence != lease.lease_id:
            raise LeaseLostError(
                f"lease {ref.lease_id} (fence {ref.fence}) is not known or long over; nothing was "
                f"written; lease the rows again"
            )
        for number, mask in masks.items():
            part = lease.parts.get(number)
            if part is None or mask & ~(part.held | part.committed | part.dropped):
                state = "was lost" if lease.lost else "does not hold all of these rows any more"
                raise LeaseLostError(
                    f"lease {lease.lease_id} of task {lease.task.spec.name!r} by "
                    f"{lease.requester!r} {state}; nothing was written; lease the rows again"
                )
        return lease

    def extend(self, leases: Iterable[LeaseRecord], seconds: float) -> None:
        """Move deadlines back."""
        for lease in leases:
            lease.expires += seconds

    def due(self, now: float) -> list[LeaseRecord]:
        """Leases whose time is up, newest first."""
        if not self._deadlines or self._deadlines[0][0] > now:
            return []  # as nearly always
        due = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, lease_id = heapq.heappop(self._deadlines)
            lease = self.live.get(lease_id)
            if lease is None:
                continue
            if lease.expires > now:  # renewed
                heapq.heappush(self._deadlines, (lease.expires, lease_id))
            else:
                due.append(lease)
        return sorted(due, key=lambda lease: -lease.lease_id)

    def next_deadline(self) -> float | None:
        """When the next lease may expire; too early rather than too late."""
        while self._deadlines and self._deadlines[0][1] not in self.live:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None
