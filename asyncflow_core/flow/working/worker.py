"""The one loop every task runs: lease, read, work, commit any finished part at once.

A worker lives where its service lives and pulls as it has room, so a faster one gets more. What the
work is (generate, score, compute advantages, record) is a function from a leased batch to parts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from asyncflow_core.batch import Batch, Column
from asyncflow_core.errors import AsyncFlowError, DataError, LeaseLostError, ServiceError
from asyncflow_core.flow.processes.control import WorkStats
from asyncflow_core.flow.working.busy import Busy
from asyncflow_core.flow.working.costs import Costs, Serial
from asyncflow_core.parts import KEY_COLUMN
from asyncflow_core.services.data_store import DataStore, Lease, Registration, RowInfo, TaskSpec

__all__ = ["LeaseKeeper", "Part", "Work", "Worker", "first_failure", "read_rows"]

_log = logging.getLogger(__name__)

_OTHERS_S = 0.01
"""Seconds a worker leaves rows to those they fall to, when there were no others."""
_WAIT_S = 5.0
"""Seconds one lease call waits inside the store; it bounds nothing, the loop asks again."""

_GIVE_BACK_S = 2.0
"""Seconds a worker that ends takes to give its rows back."""

_SAID = 3
"""Drops of one cause that are warned of; the store counts them all."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Finished rows of a lease.

    Attributes:
        rows: which.
        writes: their new columns, in the same order; None to acknowledge only.
        version: that produced them, where one did.
        drop: a reason to take the rows out instead, for every task.
    """

    rows: Sequence[RowInfo]
    writes: Batch | None = None
    version: int | None = None
    drop: str = ""


class Work(Protocol):
    """What a worker does with a leased batch: yields parts, each of its rows in exactly one."""

    def __call__(self, lease: Lease, batch: Batch) -> AsyncGenerator[Part, None]:
        """Work on the rows of `lease`, whose read columns are `batch`, in the same order."""
        ...


async def read_rows(store: DataStore, lease: Lease, columns: Sequence[str]) -> Batch:
    """The columns of a lease, with the rows' keys as `KEY_COLUMN`."""
    batch = await store.read(lease.ref(), columns)
    keys = np.array([info.key for info in lease.rows], np.int64).reshape(-1, 4)
    return batch.with_columns({KEY_COLUMN: Column.dense(keys)})


class LeaseKeeper:
    """Renews leases while their rows are worked on.

    Concurrency: one background task; a lease that is lost is only noticed here, its commit will be
    refused by the store.
    """

    def __init__(self, store: DataStore, lease_s: float) -> None:
        """Renew every third of `lease_s`."""
        self._store = store
        self._lease_s = lease_s
        self._held: set[int] = set()

    def hold(self, lease_id: int) -> None:
        """Start renewing a lease."""
        self._held.add(lease_id)

    def let_go(self, lease_id: int) -> None:
        """Stop renewing it."""
        self._held.discard(lease_id)

    async def run(self) -> None:
        """Renew until cancelled."""
        while True:
            await asyncio.sleep(self._lease_s / 3)
            if self._held:
                found = await self._store.renew(tuple(self._held), lease_s=self._lease_s)
                # What was let go meanwhile has ended, it is not lost.
                lost = self._held & set(found)
                self._held -= lost
                if lost:
                    _log.warning("leases %s are lost; their rows went to others", sorted(lost))


class Worker:
    """Runs one task's work until cancelled or until the work fails.

    Concurrency: leases are handled side by side, up to `rows_in_flight` rows together.
    """

    def __init__(
        self,
        store: DataStore,
        task: TaskSpec,
        work: Work,
        *,
        requester: str,
        rows_in_flight: int,
        rows_per_lease: int | None = None,
        policy: str = "fifo",
        lease_s: float = 60.0,
        version: Callable[[], int] | None = None,
        columns: Sequence[str] | None = None,
        share: tuple[int, int] | None = None,
        costs: Costs | None = None,
    ) -> None:
        """Prepare; `run` starts.

        Args:
            store: where rows come from.
            task: what is read and written.
            work: what is done.
            requester: name in the wait-for graph.
            rows_in_flight: most rows held at a time.
            rows_per_lease: most rows of one call of `work`; default: all there is room for.
            policy: which rows go first, one of the store's lease policies.
            lease_s: life of a lease; it is renewed while the work goes on.
            version: the version served now, for a task whose order needs one.
            columns: of the task's reads, those that `work` is given; default: all.
            share: (number, of how many workers): take only rows that fall to this one by their
                key, whoever is faster; None: any row.
            costs: what the work adds its own costs to; None: it works on a lease at a time, and
                the worker counts.
        """
        self._costs = costs or Costs()
        self._serial = Serial(self._costs) if costs is None else None
        self._share = share
        self._reach = 1 if share is None else share[1]
        self._store = store
        self._task = task
        self._work = work
        self._requester = requester
        self._rows_in_flight = rows_in_flight
        self._rows_per_lease = rows_per_lease or rows_in_flight
        self._policy = policy
        self._lease_s = lease_s
        self._version = version
        self._columns = task.reads if columns is None else columns
        self._keeper = LeaseKeeper(store, lease_s)
        self._registration: Registration | None = None
        self._left: dict[int, tuple[Lease, dict[int, RowInfo]]] = {}  # by lease, not yet committed
        self._calls: set[asyncio.Task[Lease | None]] = set()  # hand-outs not yet taken
        self._held = 0
        self._drops: Counter[str] = Counter()
        self._rows = 0
        self._busy, self._pulling = Busy(), Busy()
        self._room = asyncio.Event()
        self._room.set()
        self._changed = asyncio.Event()

    @property
    def requester(self) -> str:
        """Its name."""
        return self._requester

    @property
    def task(self) -> TaskSpec:
        """What it works on."""
        return self._task

    def stats(self) -> WorkStats:
        """What it has done so far. It waits whenever it pulls and holds no row."""
        busy_s = self._busy.seconds
        wait_s = max(0.0, self._pulling.seconds - busy_s)
        return WorkStats(busy_s, wait_s, self._rows, self._held, tuple(self._costs.sums))

    def version_changed(self) -> None:
        """Ask again at once: rows of a further batch may be admitted now."""
        self._changed.set()

    async def register(self) -> None:
        """Announce the task; rows put from now on are seen. Call it before the first put."""
        self._registration = await self._store.register(self._task)

    async def run(self) -> None:
        """Pull and work until cancelled; the first failure of the work ends it.

        However it ends, what it held goes to others at once; it may be run again.
        """
        if self._registration is None:
            await self.register()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._keeper.run())
                group.create_task(self._pull(group))
        except asyncio.CancelledError:
            await self._give_all_back()
            raise
        except BaseExceptionGroup as failures:
            await self._give_all_back()
            failure = first_failure(failures)
            raise failure from failure.__cause__

    async def _pull(self, group: asyncio.TaskGroup) -> None:
        with self._pulling:
            while True:
                await self._room.wait()
                lease = await self._ask(group)
                if lease is not None and self._share is not None:
                    lease = await self._only_its_share(lease, *self._share)
                if lease is not None:
                    self._hold(len(lease.rows))
                    self._keeper.hold(lease.lease_id)
                    self._left[lease.lease_id] = lease, {info.row: info for info in lease.rows}
                    group.create_task(self._handle(lease))

    async def _ask(self, group: asyncio.TaskGroup) -> Lease | None:
        """One hand-out; given up as soon as the version changes."""
        self._changed.clear()
        call = group.create_task(
            self._store.lease(
                self._task.name,
                requester=self._requester,
                version=self._version() if self._version else None,
                limit_rows=self._room_for() * self._reach,
                policy=self._policy,
                lease_s=self._lease_s,
                wait_s=_WAIT_S,
            )
        )
        self._calls.add(call)
        changed = group.create_task(self._changed.wait())
        try:
            await asyncio.wait({call, changed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()
        if call.done():
            self._calls.discard(call)
            return call.result()
        # Cancelling the call could lose rows that are being handed out at this moment.
        group.create_task(self._give_back(call))
        return None

    async def _only_its_share(self, lease: Lease, number: int, count: int) -> Lease | None:
        """Give the others' rows back, to the front of the queue, where they take them.

        Where many of theirs come first, the next call reaches beyond those: one that has no room
        must not hold up this one.
        """
        room = self._room_for()
        mine = [i for i in lease.rows if (i.key.sequence + i.key.sample) % count == number][:room]
        taken = {info.row for info in mine}
        rest = [info for info in lease.rows if info.row not in taken]
        if rest:
            await self._store.release(lease.ref(rest))
        if mine:
            return replace(lease, rows=tuple(mine))
        if len(rest) >= room * self._reach:
            self._reach *= 2
        else:
            await asyncio.sleep(_OTHERS_S)
        return None

    def _room_for(self) -> int:
        return min(self._rows_per_lease, self._rows_in_flight - self._held)

    async def _give_back(self, call: asyncio.Task[Lease | None]) -> None:
        lease = await call
        if lease is not None:
            await self._store.release(lease.ref())
        self._calls.discard(call)

    async def _give_all_back(self) -> None:
        """This worker ended: others may go on with its rows before its leases run out."""
        for call in self._calls:
            if not call.cancelled() and call.exception() is None and (lease := call.result()):
                self._left[lease.lease_id] = lease, {info.row: info for info in lease.rows}
        # A store that is gone or stuck gives rows back by itself, later.
        with contextlib.suppress(AsyncFlowError, TimeoutError):
            async with asyncio.timeout(_GIVE_BACK_S):
                for lease, left in self._left.values():
                    await self._store.release(lease.ref(tuple(left.values())))
        for lease_id in self._left:
            self._keeper.let_go(lease_id)
        self._left.clear()
        self._calls.clear()
        self._hold(-self._held)

    async def _handle(self, lease: Lease) -> None:
        _, left = self._left[lease.lease_id]
        try:
            with self._busy:
                await self._work_on(lease, left)
        except LeaseLostError as error:
            _log.warning("%s: %s; the rows are done again elsewhere", self._requester, error)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and not task.cancelling():
                # A task group takes it for a task that was told to end, and goes on without it.
                raise ServiceError(
                    f"{self._requester}: its work on {len(left)} rows was cancelled, and nobody "
                    f"of the run asked for that: something that it awaits was",
                    service=self._requester,
                ) from error
            raise
        if left:  # not among the parts; rows of a lost lease are back already
            await self._store.release(lease.ref(tuple(left.values())))
        del self._left[lease.lease_id]
        self._keeper.let_go(lease.lease_id)
        self._hold(-len(left))

    async def _work_on(self, lease: Lease, left: dict[int, RowInfo]) -> None:
        began = time.monotonic()
        try:
            batch = await read_rows(self._store, lease, self._columns)
        except LeaseLostError as error:
            # Nothing was done yet that is lost. With policies that drop groups this comes by the
            # hundred; what drops counts it, and says so where it is no policy's.
            _log.info("%s: %s; nothing was done with them", self._requester, error)
            return
        # Closed here and now, so that an engine stops work on rows that went to others.
        async with contextlib.aclosing(self._work(lease, batch)) as parts:
            async for part in parts:
                await self._finish(lease, part)
                for info in part.rows:
                    del left[info.row]
                self._rows += len(part.rows)
                self._hold(-len(part.rows))
        if self._serial is not None:
            tokens = sum(info.tokens for info in lease.rows)
            ended = time.monotonic()
            self._serial.call(began, ended, rows=len(lease.rows), tokens=tokens)

    async def _finish(self, lease: Lease, part: Part) -> None:
        if part.drop:
            cause = part.drop.partition(":")[0]
            self._drops[cause] += 1  # the first few tell; hundreds would hide everything else
            level = logging.WARNING if self._drops[cause] <= _SAID else logging.DEBUG
            _log.log(level, "%s drops %d rows: %s", self._requester, len(part.rows), part.drop)
            await self._store.drop([info.key for info in part.rows], reason=part.drop)
        else:
            ref = lease.ref(part.rows)
            try:
                await self._store.commit(ref, writes=part.writes, version=part.version)
            except DataError as error:
                raise DataError(f"{self._requester}: {error}") from error

    def _hold(self, rows: int) -> None:
        self._held += rows
        # Ask for an eighth at a time, so that rows that end one by one do not cost a call each.
        if self._rows_in_flight - self._held >= max(1, self._rows_in_flight // 8):
            self._room.set()
        else:
            self._room.clear()


def first_failure(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first exception of a group that is not itself a group."""
    failure: BaseException = failures
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    return failure
