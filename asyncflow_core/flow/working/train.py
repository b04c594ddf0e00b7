"""The trainer's steps: global batch `version` makes version `version + 1`.

Micro-batches train as soon as enough rows are ready; nothing is acknowledged before the update that
used it. Each row's staleness is checked again here, where it counts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from asyncflow_core import metrics
from asyncflow_core.batch import BatchRef, GroupKey
from asyncflow_core.errors import LeaseLostError, ServiceError
from asyncflow_core.flow.processes.control import StepReport, TrainerControl, WorkStats
from asyncflow_core.flow.running.policies.fixed_batches import FixedBatches
from asyncflow_core.flow.running.policies.ready_first import ReadyFirst, TooStale
from asyncflow_core.flow.running.policies.sorted_rows import TrainOrder, staleness
from asyncflow_core.flow.working.busy import Busy
from asyncflow_core.flow.working.fanout import Ranks
from asyncflow_core.flow.working.micro_batches import split
from asyncflow_core.flow.working.proximal import Proximal
from asyncflow_core.flow.working.worker import LeaseKeeper, first_failure
from asyncflow_core.metrics import Means
from asyncflow_core.services.data_store import (
    CommitResult,
    DataStore,
    Lease,
    Order,
    Registration,
    RowInfo,
    TaskSpec,
)
from asyncflow_core.services.trainer import LossSpec
from asyncflow_core.services.weight_sync import PublishedWeights

__all__ = ["TrainSettings", "TrainWorker"]

_log = logging.getLogger(__name__)

_WAIT_S = 5.0
"""Seconds one lease call waits inside the store; it bounds nothing, the loop asks again."""


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """What a step is.

    Attributes:
        task: what the trainer reads; whole groups, in the order of steps.
        loss: what is minimised.
        groups_per_step, group_size, updates_per_step, max_staleness: as in the configuration.
        micro_batch_tokens: most tokens of one micro-batch of one rank.
        whole_batch: wait for the whole share of an update before computing any of it.
        lease_s: life of the trainer's leases.
        lease_policy: which groups of a batch go first.
        too_stale: what is done with rows too old, where the task is not in the order of steps.
        proximal: task of the log-probs by the step's first weights, where the loss asks for them.
    """

    task: TaskSpec
    loss: LossSpec
    groups_per_step: int
    group_size: int
    updates_per_step: int
    max_staleness: int
    micro_batch_tokens: int
    whole_batch: bool
    lease_s: float = 300.0
    lease_policy: str = "fifo"
    too_stale: TooStale = "requeue"
    proximal: TaskSpec | None = None


@dataclass(slots=True)
class _Tally:
    """What one step did so far."""

    means: Means = field(default_factory=Means)
    rows: int = 0
    groups: int = 0
    tokens: int = 0
    staleness: list[int] = field(default_factory=list)
    staleness_updates_max: int = 0
    wait_s: float = 0.0
    busy_s: float = 0.0
    commit_s: float = 0.0
    updates: int = 0
    group_keys: list[GroupKey] = field(default_factory=list)
    rows_masked: int = 0
    tokens_too_stale: int = 0


@dataclass(frozen=True, slots=True)
class _Held:
    """A leased row; a masked one counts for the step, and is not trained."""

    lease: Lease
    info: RowInfo
    masked: bool = False


class TrainWorker(TrainerControl):
    """Rank 0's worker: leases for all ranks, drives them, publishes weights."""

    def __init__(
        self,
        store: DataStore,
        ranks: Ranks,
        settings: TrainSettings,
    ) -> None:
        """Take an opened store, and the ranks of an opened trainer."""
        self._store = store
        self._ranks = ranks
        self._settings = settings
        self._keeper = LeaseKeeper(store, settings.lease_s)
        self._registration: Registration | None = None
        self._order: TrainOrder = FixedBatches(settings.max_staleness)
        if settings.task.order is Order.ADMITTED:
            self._order = ReadyFirst(settings.max_staleness, settings.too_stale)
        self._proximal: Proximal | None = None
        if settings.proximal is not None:
            self._proximal = Proximal(
                store,
                ranks,
                settings.proximal,
                self._keeper,
                groups_per_step=settings.groups_per_step,
                lease_s=settings.lease_s,
            )
        self._first_weights_used = asyncio.Event()
        self._busy, self._waiting = Busy(), Busy()
        self._rows = 0

    async def start(self) -> None:
        """Register the task."""
        if self._proximal is not None:
            await self._proximal.register()
        self._registration = await self._store.register(self._settings.task)

    async def work(self) -> WorkStats:
        """Seconds inside the trainer's calls, and waiting for rows of a step."""
        return WorkStats(self._busy.seconds, self._waiting.seconds, self._rows)

    async def publish(self, version: int, life: int) -> PublishedWeights:
        """Export on all ranks; each publishes what it yields."""
        return await self._ranks.export(version, life)

    async def retire(self, version: int, life: int) -> None:
        """Give a version's memory back."""
        await self._ranks.retire(version, life)

    async def save(self, path: str) -> None:
        """Write a checkpoint; all ranks take part."""
        await self._ranks.save(path)

    async def load(self, path: str) -> None:
        """Go on from a checkpoint, on all ranks."""
        await self._ranks.load(path)

    async def save_model(self, path: str) -> bool:
        """Write the model, where the trainer can; all ranks take part."""
        return await self._ranks.save_model(path)

    async def step(self, version: int) -> StepReport:
        """Train one global batch."""
        tally = _Tally()
        try:
            async with asyncio.TaskGroup() as group:
                # Waiting for the rest of a share, or computing one, may take longer than a lease.
                keeping = group.create_task(self._keeper.run())
                aside = [keeping]
                self._first_weights_used.clear()
                if self._proximal is None:
                    self._first_weights_used.set()
                else:
                    serving = self._proximal.serve(version, self._first_weights_used)
                    aside.append(group.create_task(serving))
                for update in range(self._settings.updates_per_step):
                    await self._update(version, update, tally)
                for task in aside:
                    task.cancel()
        except BaseExceptionGroup as failures:
            failure = first_failure(failures)
            raise failure from failure.__cause__
        return StepReport(
            version=version + 1,
            rows=tally.rows,
            groups=tally.groups,
            tokens=tally.tokens,
            updates=tally.updates,
            staleness_rows=dict(Counter(tally.staleness)),
            staleness_updates_max=tally.staleness_updates_max,
            wait_s=tally.wait_s,
            busy_s=tally.busy_s,
            commit_s=tally.commit_s,
            metrics=tally.means.pairs(),
            group_keys=tally.group_keys,
            rows_masked=tally.rows_masked,
            tokens_too_stale=tally.tokens_too_stale,
        )

    async def _update(self, version: int, update: int, tally: _Tally) -> None:
        held: list[_Held] = []
        while True:
            try:
                means, tokens = await self._gradients(version, held, tally)
                await self._first_weights_used.wait()
                if await self._renewed(held):
                    break
            except LeaseLostError:  # of several ranks it is a failed rank, and ends the step
                if await self._renewed(held):  # rows of a living lease were dropped
                    await self._give_back(held)
            _log.warning("step %d lost a lease before its update: the update is repeated", version)
            await self._ranks.zero_grad()
        start = time.perf_counter()
        with self._busy:
            info = await self._ranks.optim_step()
        tally.busy_s += time.perf_counter() - start
        await self._acknowledge(held, version, tally)
        tally.means.add(means.pairs())
        tally.means.add(
            {metrics.TRAINER_GRAD_NORM: (info.grad_norm, 1.0), metrics.TRAINER_LR: (info.lr, 1.0)}
        )
        tally.updates = info.updates
        tally.tokens += tokens
        tally.group_keys += _groups(held)
        tally.groups += len(_groups(held))
        trained = [row for row in held if not row.masked]
        tally.rows += len(trained)
        tally.rows_masked += len(held) - len(trained)
        self._rows += len(trained)
        self._count_staleness(version, update, trained, tally)

    async def _gradients(self, version: int, held: list[_Held], tally: _Tally) -> tuple[Means, int]:
        """Fill `held` to this update's share and collect its gradient, as rows become ready."""
        share = self._settings.groups_per_step // self._settings.updates_per_step
        enough = self._settings.micro_batch_tokens * self._ranks.world_size
        means, tokens = Means(), 0
        todo = [row for row in held if not row.masked]
        while True:
            complete = len(_groups(held)) >= share
            ready = sum(row.info.tokens for row in todo)
            if not complete and (self._settings.whole_batch or ready < enough):
                more = await self._lease(version, share - len(_groups(held)), tally)
                held.extend(more)
                todo.extend(row for row in more if not row.masked)
                continue
            if self._settings.whole_batch:
                # In the order of keys, whatever order they came in: sums of floats depend on it.
                todo.sort(key=lambda row: row.info.key)
            tokens += await self._forward_backward(todo, means, tally, last=complete)
            todo = []
            if complete:
                return means, tokens

    async def _forward_backward(
        self, rows: Sequence[_Held], means: Means, tally: _Tally, *, last: bool
    ) -> int:
        start = time.perf_counter()
        parts = split(
            [row.info.tokens for row in rows],
            ranks=self._ranks.world_size,
            limit_tokens=self._settings.micro_batch_tokens,
        )
        tokens = 0
        for number, part in enumerate(parts, 1):
            with self._busy:
                info = await self._ranks.forward_backward(
                    [_refs([rows[index] for index in indices]) for indices in part],
                    self._settings.task.reads,
                    self._settings.loss,
                    last=last and number == len(parts),
                )
            means.add({metrics.TRAINER_LOSS: (info.loss_sum, info.weight), **info.metrics})
            tokens += info.tokens
        tally.busy_s += time.perf_counter() - start
        return tokens

    async def _lease(self, version: int, groups: int, tally: _Tally) -> list[_Held]:
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
        rows = [_Held(lease, info) for info in lease.rows]
        # Groups that lost rows are smaller, so that one more may have fitted the limit.
        surplus = set(list(dict.fromkeys(row.info.key.group for row in rows))[groups:])
        if surplus:
            given = [row.info for row in rows if row.info.key.group in surplus]
            await self._store.release(lease.ref(given))
            rows = [row for row in rows if row.info.key.group not in surplus]
        return await self._sorted(version, lease, [row.info for row in rows], tally)

    async def _sorted(
        self, version: int, lease: Lease, rows: Sequence[RowInfo], tally: _Tally
    ) -> list[_Held]:
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
        masked = [_Held(lease, rows[at], masked=True) for at in found.mask]
        return [*(_Held(lease, rows[at]) for at in found.train), *masked]

    def _count_staleness(
        self, version: int, update: int, held: Sequence[_Held], tally: _Tally
    ) -> None:
        found = [staleness(version, row.info) for row in held]
        tally.staleness.extend(found)
        in_updates = max(found, default=0) * self._settings.updates_per_step + update
        tally.staleness_updates_max = max(tally.staleness_updates_max, in_updates)

    async def _renewed(self, held: list[_Held]) -> bool:
        """Let the leases outlast the update; rows of lost ones leave `held`."""
        leases = {row.lease.lease_id for row in held}
        lost = await self._store.renew(tuple(leases), lease_s=self._settings.lease_s)
        for lease_id in lost:
            self._keeper.let_go(lease_id)
        held[:] = [row for row in held if row.lease.lease_id not in lost]
        return not lost

    async def _give_back(self, held: list[_Held]) -> None:
        for ref in _refs(held):
            self._keeper.let_go(ref.lease_id)
            await self._store.release(ref)
        held.clear()

    async def _acknowledge(self, held: Sequence[_Held], version: int, tally: _Tally) -> None:
        start = time.perf_counter()
        for ref in _refs(held):
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

    async def _acknowledge_again(self, held: Sequence[_Held], version: int) -> CommitResult:
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


def _groups(rows: Sequence[_Held]) -> list[GroupKey]:
    return list(dict.fromkeys(row.info.key.group for row in rows))


def _refs(rows: Sequence[_Held]) -> list[BatchRef]:
    """The rows by reference, one reference a lease."""
    by_lease: dict[int, tuple[Lease, list[RowInfo]]] = {}
    for row in rows:
        by_lease.setdefault(row.lease.lease_id, (row.lease, []))[1].append(row.info)
    return [lease.ref(infos) for lease, infos in by_lease.values()]
