"""The data store in this process: an asyncio shell around the ledger."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncflow_core.batch import Batch, BatchRef, Column, GroupKey, Key
from asyncflow_core.errors import (
    ConfigError,
    DataError,
    LeaseLostError,
    ServiceClosedError,
    ServiceTimeoutError,
    UnsupportedCapabilityError,
)
from asyncflow_core.ledger import Admission, Claim, LeasePolicy, Ledger
from asyncflow_core.reference.payload import Payload
from asyncflow_core.schema import PER_TOKEN, oldest_version, token_count, validate
from asyncflow_core.services.data_store import (
    CommitResult,
    DataStore,
    DataStoreCapabilities,
    Lease,
    PutResult,
    Registration,
    StoreStats,
    TaskSpec,
)

__all__ = ["InProcessDataStore"]

_BY_RESPONSE = {*PER_TOKEN, "versions"}  # columns whose lengths follow the response's


class _Pulse:
    """Something waiters wait for, again and again."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    async def wait(self) -> None:
        """Until the next `fire`."""
        await self._event.wait()

    def fire(self) -> None:
        """Wake all who wait now (`set` resolves their futures at once)."""
        self._event.set()
        self._event.clear()


class InProcessDataStore(DataStore):
    """Rows in this process's memory. It owns them, and one timer for expiring leases.

    Concurrency: for one event loop. Between two awaits a call finishes with ledger and payload in
    agreement, so there are no locks but the queue of producers that wait for room. Whoever waits
    holds nothing; a cancelled call has either not begun or is done.
    """

    def __init__(
        self,
        *,
        capacity_rows: int = 65536,
        capacity_bytes: int = 2 << 30,
        max_staleness: int = 0,
        durability: str = "none",
        policies: Mapping[str, LeasePolicy] | None = None,
        max_gap_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; `open` starts.

        Args:
            capacity_rows: rows admitted at a time.
            capacity_bytes: bytes reserved at a time, by the `row_bytes` of puts.
            max_staleness: versions, bounds what `Order.ADMITTED` tasks get.
            durability: only "none".
            policies: lease policies beside "fifo".
            max_gap_s: a longer silence of the clock means that this process was stopped; leases
                live longer by as much.
            clock: seconds, never running back.
        """
        if durability != "none":
            raise UnsupportedCapabilityError(
                f"the in-process data store has no durability {durability!r}, only 'none'; "
                f"use a store that writes to disk"
            )
        self._ledger = Ledger(
            capacity_rows=capacity_rows,
            capacity_bytes=capacity_bytes,
            max_staleness=max_staleness,
            max_gap_s=max_gap_s,
            policies=policies,
        )
        self.capabilities = DataStoreCapabilities(
            lease_policies=frozenset(self._ledger.policies),
            capacity_rows=capacity_rows,
            capacity_bytes=capacity_bytes,
        )
        self._payload = Payload()
        self._clock = clock
        self._open = False
        self._ready: dict[str, _Pulse] = {}  # by task, ended ones too
        self._room = _Pulse()
        self._drops = _Pulse()
        self._turn = asyncio.Lock()  # producers wait in line; the first one waits for room
        self._waiting_puts = 0
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0  # when the timer fires, on our clock

    async def open(self) -> None:
        """Start taking calls."""
        self._open = True

    async def aclose(self) -> None:
        """End all waiting calls with `ServiceClosedError`."""
        self._open = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for pulse in (*self._ready.values(), self._room, self._drops):
            pulse.fire()

    async def register(self, task: TaskSpec) -> Registration:
        """See `DataStore.register`."""
        self._check_open()
        self._ledger.register(task)
        self._ready.setdefault(task.name, _Pulse())
        return Registration(task, lambda: self._leave(task.name))

    async def put(
        self,
        groups: Batch,
        *,
        keys: Sequence[GroupKey],
        samples: int = 1,
        batch: int | None = None,
        partition: str = "train",
        row_bytes: int = 0,
        wait_s: float | None = None,
    ) -> PutResult:
        """See `DataStore.put`."""
        self._check_open()
        validate(groups, [Key(*key, 0) for key in keys])
        admission = Admission(tuple(groups), samples, batch, partition, row_bytes)
        new = [position for position, key in enumerate(keys) if not self._ledger.known(key)]
        if not new:
            return PutResult(stored=0, known=len(keys))
        self._ledger.check_admission(admission)
        self._ledger.fits(admission)  # refuses what never will
        self._payload.agree(groups)
        stored = 0
        self._waiting_puts += 1
        try:
            async with asyncio.timeout(wait_s), self._turn:
                for position in new:
                    await self._wait_for_room(admission)
                    stored += self._store(keys[position], admission, groups, position)
        except TimeoutError:
            raise ServiceTimeoutError(
                f"put waited {wait_s} s for room; {stored} of {len(keys)} groups are stored; "
                f"put the same groups again, stored ones are skipped"
            ) from None
        finally:
            self._waiting_puts -= 1
        return PutResult(stored=stored, known=len(keys) - stored)

    async def lease(
        self,
        task: str,
        *,
        requester: str,
        version: int | None = None,
        limit_rows: int | None = None,
        limit_tokens: int | None = None,
        policy: str = "fifo",
        lease_s: float = 60.0,
        wait_s: float = 0.0,
    ) -> Lease | None:
        """See `DataStore.lease`."""
        deadline = asyncio.get_running_loop().time() + wait_s
        while True:
            self._check_open()
            lease = self._ledger.lease(
                self._clock(),
                task,
                requester=requester,
                version=version,
                limit_rows=limit_rows,
                limit_tokens=limit_tokens,
                policy=policy,
                lease_s=lease_s,
            )
            self._follow()
            if lease is not None or not await _wait(self._ready[task], deadline):
                return lease

    async def read(self, ref: BatchRef, columns: Sequence[str]) -> Batch:
        """See `DataStore.read`."""
        claim = self._inspect(self._clock(), ref)
        unread = sorted(set(columns) - set(claim.task.reads))
        if unread:
            raise DataError(
                f"task {claim.task.name!r} does not read {unread} (it reads: "
                f"{list(claim.task.reads)}); add them to its `reads`"
            )
        if len(claim.held) < len(ref.rows):
            gone = len(ref.rows) - len(claim.held)
            raise LeaseLostError(
                f"{gone} of {len(ref.rows)} rows of lease {ref.lease_id} were dropped or are "
                f"committed and cannot be read; release the rest and lease again"
            )
        return self._payload.read(ref.rows, columns)

    async def renew(self, leases: Sequence[int], *, lease_s: float) -> tuple[int, ...]:
        """See `DataStore.renew`; a renewal never shortens a lease."""
        self._check_open()
        lost = self._ledger.renew(self._clock(), leases, lease_s=lease_s)
        self._follow()
        return lost

    async def commit(
        self,
        ref: BatchRef,
        *,
        writes: Batch | None = None,
        version: int | None = None,
    ) -> CommitResult:
        """See `DataStore.commit`; `version` matters to durable stores only."""
        now = self._clock()  # once: a lease that lives at the check lives at the commit
        claim = self._inspect(now, ref)
        if version is not None and version < 0:
            raise ConfigError(f"versions count from 0, got version={version}")
        batch = Batch({}, rows=len(ref.rows)) if writes is None else writes
        if batch.rows != len(ref.rows) or set(batch) != set(claim.task.writes):
            raise DataError(
                f"a commit of {len(ref.rows)} rows by task {claim.task.name!r} writes "
                f"{sorted(claim.task.writes)}, got {batch.rows} rows of {sorted(batch)}; "
                f"write exactly these columns, a row for each"
            )
        rows = [ref.rows[position] for position in claim.held]
        new = batch if len(rows) == len(ref.rows) else batch.take(claim.held)
        self._check_writes(rows, new)
        for position, row in enumerate(rows):
            self._payload.write(row, new, position)
        facts = [batch.row(position) for position in range(batch.rows)]
        ages = map(_oldest, facts)
        result = self._ledger.commit(
            now,
            ref,
            tokens=[token_count(fact) for fact in facts],
            oldest=[-1 if age is None else age for age in ages],
        )
        self._follow()
        return result

    async def release(self, ref: BatchRef) -> None:
        """See `DataStore.release`."""
        self._check_open()
        self._ledger.release(self._clock(), ref)
        self._follow()

    async def evict(self, requester: str) -> int:
        """See `SupportsEviction.evict`."""
        self._check_open()
        count = self._ledger.evict(self._clock(), requester)
        self._follow()
        return count

    async def drop(self, keys: Sequence[Key], *, reason: str) -> int:
        """See `DataStore.drop`."""
        self._check_open()
        count = self._ledger.drop(keys, reason=reason)
        self._follow()
        return count

    async def stats(self, *, drops_after: int = 0, wait_s: float = 0.0) -> StoreStats:
        """See `DataStore.stats`."""
        deadline = asyncio.get_running_loop().time() + wait_s
        self._check_open()
        while self._ledger.last_serial <= drops_after and await _wait(self._drops, deadline):
            self._check_open()
        self._tick()
        return dataclasses.replace(
            self._ledger.stats(drops_after=drops_after),
            bytes=self._payload.nbytes,
            waiting_puts=self._waiting_puts,
        )

    def _check_open(self) -> None:
        if not self._open:
            raise ServiceClosedError(
                "the data store is not open; use it between open() and aclose()"
            )

    def _inspect(self, now: float, ref: BatchRef) -> Claim:
        self._check_open()
        try:
            return self._ledger.inspect(now, ref)
        finally:
            self._follow()  # time that passed may have ended leases

    async def _wait_for_room(self, admission: Admission) -> None:
        self._check_open()
        while not self._ledger.fits(admission):
            await self._room.wait()
            self._check_open()

    def _store(self, key: GroupKey, admission: Admission, groups: Batch, position: int) -> bool:
        """Keep one group; False when its key became known meanwhile."""
        fact = groups.row(position)
        number = self._ledger.put(key, admission, tokens=token_count(fact), oldest=_oldest(fact))
        if number is None:
            return False
        self._payload.add_group(number, groups, position, admission.samples)
        self._follow()
        return True

    def _check_writes(self, rows: Sequence[int], writes: Batch) -> None:
        """Check new columns of living rows, by the rows' own responses where they have one."""
        response: Column | None = None
        needed = "response_ids" not in writes and not writes.keys().isdisjoint(_BY_RESPONSE)
        if needed and all(self._payload.has(row, "response_ids") for row in rows):
            response = self._payload.read(rows, ("response_ids",))["response_ids"]
        validate(writes, [self._ledger.key_of(row) for row in rows], response=response)
        self._payload.agree(writes)

    def _follow(self) -> None:
        """Carry out what the ledger's last acts imply, and set the timer."""
        effects = self._ledger.take_effects()
        for row in effects.freed:
            self._payload.free(row)
        if effects.gone:
            self._room.fire()
        if effects.groups_dropped:
            self._drops.fire()
        for task in effects.ready:
            self._ready[task].fire()
        self._set_timer()

    def _set_timer(self) -> None:
        deadline = self._ledger.next_deadline() if self._open else None
        if self._timer is not None:
            if deadline is not None and self._due <= deadline:
                return  # it comes in time, and then sets the next
            self._timer.cancel()
            self._timer = None
        if deadline is not None:
            delay = max(0.0, deadline - self._clock())
            self._due = deadline
            self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._tick()

    def _tick(self) -> None:
        self._ledger.advance(self._clock())
        self._follow()

    async def _leave(self, name: str) -> None:
        if self._open:
            self._ledger.leave(name)
            self._follow()


async def _wait(pulse: _Pulse, deadline: float) -> bool:
    """Wait for a pulse until a loop time; False when it has passed."""
    if deadline <= asyncio.get_running_loop().time():
        return False
    try:
        async with asyncio.timeout_at(deadline):
            await pulse.wait()
    except TimeoutError:
        return False
    return True


def _oldest(row: Mapping[str, Any]) -> int | None:
    return oldest_version(row["versions"]) if "versions" in row else None
