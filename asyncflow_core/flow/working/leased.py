"""The trainer's leased rows: from their hand-out to the word that they are trained.

Nothing is acknowledged before the update that used it. Each row's staleness is checked again here,
where it counts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from asyncflow_core.batch import BatchRef, GroupKey
from asyncflow_core.errors import LeaseLostError, ServiceError
from asyncflow_core.flow.running.policies.sorted_rows import TrainOrder
from asyncflow_core.flow.working.busy import Busy
from asyncflow_core.flow.working.step import Tally, TrainSettings
from asyncflow_core.flow.working.worker import LeaseKeeper
from asyncflow_core.services.data_store import CommitResult, DataStore, Lease, RowInfo

__all__ = ["Held", "LeasedRows", "groups_of", "references"]

_log = logging.getLogger(__name__)

_WAIT_S = 5.0
"""Seconds one lease call waits inside the store; it bounds nothing, the loop asks again."""


@dataclass(frozen=True, slots=True)
class Held:
    """A leased row; a masked one counts for the step, and is not trained."""

    lease: Lease
    info: RowInfo
    masked: bool = False


class LeasedRows:
    """Leases rows of a step's batch, as an order of training wants them, and acknowledges them."""

    def __init__(
        self,
        store: DataStore,
        settings: TrainSettings,
        order: TrainOrder,
        keeper: LeaseKeeper,
        waiting: Busy,
    ) -> None:
        """Keep the arguments; `keeper` renews what is held, `waiting` counts waits for rows."""
        self._store = store
        self._settings = settings
        self._order = order
        self._keeper = keeper
        self._waiting = waiting

    async def lease(self, version: int, groups: int, tally: Tally) -> list[Held]:
        """Rows of up to `groups` further groups of this step's batch; waits for the first."""
        start = time.perf_counter()
        lease: Lease | None = None
        while lease is None:
            with self._waiting:
                lease = await self._store.lease(
                    self._settings.task.name,
                    requester="trainer",
                    version=version,
                    limit_rows=groups * self._settings.group_size,
                    policy=self._settings.lease_policy,
                    lease_s=self._settings.lease_s,
                    wait_s=_WAIT_S,
                )
        tally.wait_s += time.perf_counter() - start
        self._keeper.hold(lease.lease_id)
        rows = [Held(lease, info) for info in lease.rows]
        # Groups that lost rows are smaller, so that one more may have fitted the limit.
        surplus = set(list(dict.fromkeys(row.info.key.group for row in rows))[groups:])
        if surplus:
            given = [row.info for row in rows if row.info.key.group in surplus]
            await self._store.release(lease.ref(given))
            rows = [row for row in rows if row.info.key.group not in surplus]
        return await self._sorted(version, lease, [row.info for row in rows], tally)

    async def _sorted(
        self, version: int, lease: Lease, rows: Sequence[RowInfo], tally: Tally
    ) -> list[Held]:
        """What the order makes of leased rows; what it wants dropped is dropped."""
        found = self._order.sort(version, rows)
        if old := [rows[at] for at in (*found.mask, *found.drop)]:
            responses = await self._store.read(lease.ref(old), ("response_ids",))
            tally.tokens_too_stale += int(responses["response_ids"].lengths.sum())
        if found.drop:
            keys = [rows[at].key for at in found.drop]
            await self._store.drop(keys, reason=found.reason)
        if not (found.train or found.mask):
            self._keeper.let_go(lease.lease_id)
        masked = [Held(lease, rows[at], masked=True) for at in found.mask]
        return [*(Held(lease, rows[at]) for at in found.train), *masked]

    async def renewed(self, held: list[Held]) -> bool:
        """Let the leases outlast the update; rows of lost ones leave `held`."""
        leases = {row.lease.lease_id for row in held}
        lost = await self._store.renew(tuple(leases), lease_s=self._settings.lease_s)
        for lease_id in lost:
            self._keeper.let_go(lease_id)
        held[:] = [row for row in held if row.lease.lease_id not in lost]
        return not lost

    async def give_back(self, held: list[Held]) -> None:
        """Let others have rows that are not trained; `held` is empty then."""
        for ref in references(held):
            self._keeper.let_go(ref.lease_id)
            await self._store.release(ref)
        held.clear()

    async def acknowledge(self, held: Sequence[Held], version: int, tally: Tally) -> None:
        """Tell the store that the step from `version` trained these rows.

        Raises:
            ServiceError: rows were dropped meanwhile; what was trained is not what the store knows.
        """
        start = time.perf_counter()
        for ref in references(held):
            try:
                result = await self._store.commit(ref, version=version + 1)
            except LeaseLostError as error:
                _log.warning("step %d: %s; what is trained is acknowledged anew", version, error)
                result = await self._acknowledge_again(held, version)
            self._keeper.let_go(ref.lease_id)
            if result.dropped:
                raise ServiceError(
                    f"{result.dropped} rows of step {version} were dropped while they were trained",
                    service="trainer",
                )
        tally.commit_s += time.perf_counter() - start

    async def _acknowledge_again(self, held: Sequence[Held], version: int) -> CommitResult:
        """Commit trained rows whose leases went with a process of the store, or with time.

        They came back to this task, which has no other trainer: they are still its own. Those that
        are not handed out were committed before.
        """
        lease = await self._store.lease(
            self._settings.task.name,
            requester="trainer",
            version=version,
            lease_s=self._settings.lease_s,
        )
        if lease is None:
            return CommitResult(0)
        trained = {row.info.key for row in held}
        mine = [info for info in lease.rows if info.key in trained]
        await self._store.release(lease.ref([i for i in lease.rows if i.key not in trained]))
        return await self._store.commit(lease.ref(mine), version=version + 1)


def groups_of(rows: Sequence[Held]) -> list[GroupKey]:
    """The groups of rows, each once, in the order they came."""
    return list(dict.fromkeys(row.info.key.group for row in rows))


def references(rows: Sequence[Held]) -> list[BatchRef]:
    """The rows by reference, one reference a lease."""
    by_lease: dict[int, tuple[Lease, list[RowInfo]]] = {}
    for row in rows:
        by_lease.setdefault(row.lease.lease_id, (row.lease, []))[1].append(row.info)
    return [lease.ref(infos) for lease, infos in by_lease.values()]
