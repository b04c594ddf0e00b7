"""The trainer's steps: global batch `version` makes version `version + 1`.

Micro-batches train as soon as enough rows are ready; nothing is acknowledged before the update that
used it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from asyncflow_core import metrics
from asyncflow_core.errors import LeaseLostError
from asyncflow_core.flow.processes.control import StepReport, TrainerControl, WorkStats
from asyncflow_core.flow.running.policies.fixed_batches import FixedBatches
from asyncflow_core.flow.running.policies.ready_first import ReadyFirst
from asyncflow_core.flow.running.policies.sorted_rows import TrainOrder
from asyncflow_core.flow.working.busy import Busy
from asyncflow_core.flow.working.fanout import Ranks
from asyncflow_core.flow.working.leased import Held, LeasedRows, groups_of, references
from asyncflow_core.flow.working.micro_batches import split
from asyncflow_core.flow.working.proximal import Proximal
from asyncflow_core.flow.working.step import Tally, TrainSettings
from asyncflow_core.flow.working.worker import LeaseKeeper, first_failure
from asyncflow_core.metrics import Means
from asyncflow_core.services.data_store import (
    DataStore,
    Order,
    Registration,
)
from asyncflow_core.services.weight_sync import PublishedWeights

__all__ = ["TrainWorker"]

_log = logging.getLogger(__name__)


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
        order: TrainOrder = FixedBatches(settings.max_staleness)
        if settings.task.order is Order.ADMITTED:
            order = ReadyFirst(settings.max_staleness, settings.too_stale)
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
        self._leased = LeasedRows(store, settings, order, self._keeper, self._waiting)
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

    async def coming(self, version: int, life: int) -> PublishedWeights | None:
        """Of the rank that yields all weights."""
        return await self._ranks.coming(version, life)

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
        tally = Tally()
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
        return tally.report(version)

    async def _update(self, version: int, update: int, tally: Tally) -> None:
        held: list[Held] = []
        while True:
            try:
                means, tokens = await self._gradients(version, held, tally)
                await self._first_weights_used.wait()
                if await self._leased.renewed(held):
                    break
            except LeaseLostError:  # of several ranks it is a failed rank, and ends the step
                if await self._leased.renewed(held):  # rows of a living lease were dropped
                    await self._leased.give_back(held)
            _log.warning("step %d lost a lease before its update: the update is repeated", version)
            await self._ranks.zero_grad()
        start = time.perf_counter()
        with self._busy:
            info = await self._ranks.optim_step()
        tally.busy_s += time.perf_counter() - start
        await self._leased.acknowledge(held, version, tally)
        tally.means.add(means.pairs())
        tally.means.add(
            {metrics.TRAINER_GRAD_NORM: (info.grad_norm, 1.0), metrics.TRAINER_LR: (info.lr, 1.0)}
        )
        tally.updates = info.updates
        tally.tokens += tokens
        tally.group_keys += groups_of(held)
        tally.groups += len(groups_of(held))
        trained = [row for row in held if not row.masked]
        tally.rows += len(trained)
        tally.rows_masked += len(held) - len(trained)
        self._rows += len(trained)
        tally.count_staleness(
            version,
            update,
            [row.info for row in trained],
            updates_per_step=self._settings.updates_per_step,
        )

    async def _gradients(self, version: int, held: list[Held], tally: Tally) -> tuple[Means, int]:
        """Fill `held` to this update's share and collect its gradient, as rows become ready."""
        share = self._settings.groups_per_step // self._settings.updates_per_step
        enough = self._settings.micro_batch_tokens * self._ranks.world_size
        means, tokens = Means(), 0
        todo = [row for row in held if not row.masked]
        while True:
            complete = len(groups_of(held)) >= share
            ready = sum(row.info.tokens for row in todo)
            if not complete and (self._settings.whole_batch or ready < enough):
                more = await self._leased.lease(version, share - len(groups_of(held)), tally)
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
        self, rows: Sequence[Held], means: Means, tally: Tally, *, last: bool
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
                    [references([rows[index] for index in indices]) for indices in part],
                    self._settings.columns,
                    self._settings.loss,
                    last=last and number == len(parts),
                )
            means.add({metrics.TRAINER_LOSS: (info.loss_sum, info.weight), **info.metrics})
            tokens += info.tokens
        tally.busy_s += time.perf_counter() - start
        return tokens
