"""The data store of a simulated run: the ledger itself, on virtual time, and who waits. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from asyncflow_core.batch import GroupKey
from asyncflow_core.flow.simulation.clock import Clock
from asyncflow_core.ledger import Admission, Ledger
from asyncflow_core.services.data_store import Lease, RowInfo, TaskSpec

__all__ = ["Table"]

_FOR_EVER = 1e12


class Table:
    """Hands out rows as a run's store does, in no time.

    Waiters of a task are called in the order in which they began to wait; each is called once, and
    waits again if it got nothing.
    """

    def __init__(self, clock: Clock, tasks: Sequence[TaskSpec], *, max_staleness: int) -> None:
        """An empty table with its tasks registered; it has room for everything."""
        self._clock = clock
        self._ledger = Ledger(
            capacity_rows=1 << 40,
            capacity_bytes=1 << 60,
            max_staleness=max_staleness,
            max_gap_s=_FOR_EVER,
            remember_rows=1,
        )
        self._waiting: dict[str, deque[Callable[[], None]]] = {}
        for task in tasks:
            self._ledger.register(task)
            self._waiting[task.name] = deque()

    def put(
        self,
        first: int,
        groups: int,
        *,
        columns: Sequence[str],
        samples: int,
        batch: int,
        tokens: int,
    ) -> None:
        """Put prompt groups of a batch, with sequences from `first` on."""
        admission = Admission(tuple(columns), samples, batch)
        for sequence in range(first, first + groups):
            self._ledger.put(GroupKey(0, 0, sequence), admission, tokens=tokens)
        self._wake()

    def lease(
        self, task: str, requester: str, *, version: int | None, limit_rows: int, policy: str
    ) -> Lease | None:
        """Ready rows, or None."""
        return self._ledger.lease(
            self._clock.now,
            task,
            requester=requester,
            version=version,
            limit_rows=limit_rows,
            policy=policy,
            lease_s=_FOR_EVER,
        )

    def wait(self, task: str, call: Callable[[], None]) -> None:
        """Call once, when rows of a task become ready."""
        self._waiting[task].append(call)

    def release(self, lease: Lease, rows: Sequence[RowInfo]) -> None:
        """Give back, to the front of their queue, rows that nobody who waits may take."""
        self._ledger.release(self._clock.now, lease.ref(rows))
        self._ledger.take_effects()

    def commit(
        self,
        lease: Lease,
        rows: Sequence[RowInfo],
        *,
        tokens: Sequence[int] = (),
        oldest: Sequence[int] = (),
    ) -> None:
        """Rows of a lease are done: their task's columns are there from now on."""
        self._ledger.commit(self._clock.now, lease.ref(rows), tokens=tokens, oldest=oldest)
        self._wake()

    def _wake(self) -> None:
        for task in sorted(self._ledger.take_effects().ready):
            waiting = self._waiting[task]
            for _ in range(len(waiting)):
                self._clock.after(0.0, waiting.popleft())
