"""Bringing prompts into the store: training groups as admission allows, evaluation on demand."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

from asyncflow_core.batch import Batch, GroupKey, Key
from asyncflow_core.config import RunConfig
from asyncflow_core.errors import ConfigError, ServiceError
from asyncflow_core.flow.running.admission import Admission
from asyncflow_core.flow.running.assigned import TRAINING, Assigned, dropped_record, groups_record
from asyncflow_core.flow.running.cursor import fingerprint
from asyncflow_core.flow.running.pacing import Pacing
from asyncflow_core.flow.running.policies.dynamic_sampling import ALL_EQUAL
from asyncflow_core.flow.running.policies.over_sampling import BIASED, STRAGGLER, OverSampling
from asyncflow_core.flow.running.policies.ready_first import TOO_STALE, ReadyAdmission
from asyncflow_core.flow.running.prompt_source import PromptSource
from asyncflow_core.flow.running.room import check_room, row_bytes
from asyncflow_core.flow.working.worker import first_failure
from asyncflow_core.parts import PromptRecord, Prompts
from asyncflow_core.services.data_store import NO_DROPS, DataStore, DroppedGroup

__all__ = ["EVALUATION", "Supply"]

_log = logging.getLogger(__name__)

EVALUATION = 1
"""Source of held-out prompts, as keys number them; see `Supply.bring_back`."""

_AGAIN = 1 << 15
"""Source of prompts that are answered again with order ready_first; one more each time."""

_POLICIES = (ALL_EQUAL, STRAGGLER, TOO_STALE)
"""Reasons to drop a group that policies have."""

_ADVICE = {
    ALL_EQUAL: "; the rewards do not tell these responses apart: take prompts that are neither too "
    "easy nor too hard, or workflow.dynamic_sampling=false",
}
"""What to do about reasons of which too many are dropped."""

_SAID_IN_A_ROW = 3
"""Dropped groups of one step that are warned of."""


class Supply:
    """Feeds the store.

    Concurrency: `run` is one task beside the others. Prompts are made on a thread: a plugin may
    take its time, and the event loop serves every process.
    """

    def __init__(
        self,
        store: DataStore,
        prompts: Prompts,
        config: RunConfig,
        thread: Executor,
        *,
        version: int = 0,
        assigned: Assigned | None = None,
        note: Callable[[Mapping[str, Any]], None] | None = None,
        dropped: Callable[[DroppedGroup], None] | None = None,
    ) -> None:
        """Start at the first prompt of epoch 0, or where an earlier life of the run was.

        Args:
            store: where prompts go.
            prompts: where they come from.
            config: of the run.
            thread: runs one call at a time.
            version: completed steps.
            assigned: what was drawn before; batches below `version` are trained.
            note: writes down a record of `Assigned`, on the thread, before the store sees it.
            dropped: is told of every dropped group of training.
        """
        self._store = store
        self._config = config
        self._thread = thread
        self._note = note
        flow = config.workflow
        self._over = OverSampling(
            groups_per_step=flow.groups_per_step,
            extra_groups=flow.extra_groups,
            group_size=flow.group_size,
        )
        if flow.extra_groups:
            _log.warning("%s", BIASED)
        self._version = self._opened = version
        self._pacing, self._opens_at = Pacing(flow.bound), 0.0
        self._dropped = dropped or _nothing
        self._admission = (Admission if flow.order == "batches" else ReadyAdmission)(
            groups_per_step=self._over.started,
            steps=flow.steps,
            max_staleness=flow.bound,
            version=version,
        )
        self.assigned = assigned or Assigned()
        self.source = PromptSource(
            prompts, config.prompts.plugin, thread, at=self.assigned.next, last=self.assigned.last
        )
        self._again: dict[int, deque[tuple[GroupKey, PromptRecord]]] = {}
        self._drops_seen = 0
        self._filling = -1
        self._trained: frozenset[GroupKey] = frozenset()
        self._evaluation_source = EVALUATION
        self._wake = asyncio.Event()
        self._wake.set()
        self._dropped_in_a_row = 0
        self.rows_put = self.assigned.closed * flow.group_size
        self.rows_evaluated = 0
        self.notes = 0
        """Records written down in this life."""

    async def bring_back(self, life: int, dropped: int = 0) -> None:
        """Before `run`, in a later life: find the prompts of batches that are not trained.

        Groups that a store kept are put again under their own keys, which changes nothing.

        Args:
            life: of the run, 0 for a store that knows nothing of the ones before. Another one
                remembers keys, so held-out prompts get a source of their own in each life.
            dropped: groups of these batches that were dropped by the time of the checkpoint; the
                store of a life that it knows counts later ones, too.
        """
        self._evaluation_source = EVALUATION + life
        for group in (await self._store.stats()).dropped_groups:
            self._drops_seen = group.serial
            if group.batch is not None and group.group in self.assigned.living(group.batch):
                await self._write(dropped_record(group.batch, [group.group]))
        gone = self.assigned.dropped if life else dropped
        self.rows_put += gone * self._config.workflow.group_size
        batches = {batch: self.assigned.living(batch) for batch in self.assigned.batches()}
        keys = [key for living in batches.values() for key in living]
        records = await self.source.again(keys)
        self._again = {
            batch: deque((key, records[key]) for key in living) for batch, living in batches.items()
        }

    def advance(self, version: int, trained: Sequence[GroupKey] = ()) -> list[Key]:
        """A step completed, which trained these groups: the next batch may be admitted.

        Returns:
            Rows of its batch that are not waited for, to be dropped.
        """
        late = []
        if self._config.workflow.extra_groups:
            late = self._over.stragglers(self.assigned.living(version - 1), trained)
        self._version = version
        if self._filling == version - 1:
            self._trained = frozenset(trained)
        self._open_later()
        self.assigned.close(version)
        self._dropped_in_a_row = 0
        self._wake.set()
        return late

    def paced(self, *, slack_s: float, waited_s: float, step_s: float) -> float:
        """A step was done, see `Pacing.stepped`; the delay of the batches to come, in seconds."""
        if self._config.workflow.pacing and self._config.workflow.order == "batches":
            self._pacing.stepped(slack_s=slack_s, waited_s=waited_s, step_s=step_s)
        return self._pacing.delay_s

    def _open_later(self) -> None:
        """Let the next batch start after the delay; replacements of dropped groups never wait."""
        loop = asyncio.get_running_loop()
        self._opens_at = max(self._opens_at, loop.time() + self._pacing.delay_s)
        if self._pacing.delay_s:
            loop.call_at(self._opens_at, self._open, self._version)
        else:
            self._open(self._version)

    def _open(self, version: int) -> None:
        while self._opened < version:
            self._opened += 1
            self._admission.advance(self._opened)
        self._wake.set()

    async def held_out(self) -> list[PromptRecord]:
        """The held-out prompts; none without an evaluation."""
        evaluation = self._config.evaluation
        if evaluation is None:
            return []
        return await self.source.held_out(evaluation.limit)

    async def evaluate(
        self, version: int, records: Sequence[PromptRecord], samples: int, *, first: int = 0
    ) -> None:
        """Put held-out prompts outside batches, for the evaluation of a version.

        Args:
            version: it is the epoch of their keys.
            records: some of the prompts.
            samples: rows of each.
            first: number of the first of them among all.
        """
        numbers = range(first, first + len(records))
        keys = [GroupKey(self._evaluation_source, version, number) for number in numbers]
        await self._put(self.source.columns(records), keys, samples, None, "eval")
        self.rows_evaluated += len(records) * samples

    async def run(self) -> None:
        """Put training groups as soon as they may start, replace dropped ones, until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                # In this order: what a resumed run drops early is of a batch admitted by then.
                group.create_task(self._admit())
                group.create_task(self._watch_drops())
        except BaseExceptionGroup as failures:
            failure = first_failure(failures)
            raise failure from failure.__cause__

    async def _admit(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            places: dict[int, int] = {}
            while (batch := self._admission.next()) is not None:
                places[batch] = places.get(batch, 0) + 1
            for batch, groups in places.items():
                await self._fill(batch, groups)

    async def _fill(self, batch: int, groups: int) -> None:
        """Put groups of one batch: those that an earlier life assigned to it, then new ones."""
        if self._passed(batch):
            # Over-sampling: trained without them. Or a store that kept all of it was quicker.
            kept = self._again.pop(batch, ())
            self.rows_put += len(kept) * self._config.workflow.group_size
            return
        self._filling, self._trained = batch, frozenset()
        flow = self._config.workflow
        waiting = self._again.get(batch, deque())
        again = [waiting.popleft() for _ in range(min(groups, len(waiting)))]
        drawn = await self.source.draw(groups - len(again))
        if drawn:
            prompts, key = self.source.columns([record for _, record in drawn]), drawn[-1][0]
            last = fingerprint(prompts["prompt_ids"][-1])
            following = (key.epoch, key.sequence + 1)
            await self._write(groups_record(batch, [k for k, _ in drawn], following, last))
        await self._put_training(batch, again)
        known = await self._put_training(batch, drawn)
        if known:
            raise ConfigError(
                f"data_store: it knows {known} prompts of batch {batch} that this run draws for "
                f"the first time, so it holds another run's rows; give this run a store of its own "
                f"(an empty directory), or resume with checkpoint.resume=exact"
            )
        if self._passed(batch):
            # Its stragglers were dropped while these were on their way to the store.
            put = (key for key, _ in (*again, *drawn) if key not in self._trained)
            rows = [Key(*key, sample) for key in put for sample in range(flow.group_size)]
            await self._store.drop(rows, reason=STRAGGLER)

    def _passed(self, batch: int) -> bool:
        """Whether the step of a batch is done, where a step trains the groups of its batch."""
        return self._config.workflow.order == "batches" and batch < self._version

    async def _put_training(
        self, batch: int, found: Sequence[tuple[GroupKey, PromptRecord]]
    ) -> int:
        """Put groups; how many the store knew."""
        if not found:
            return 0
        size = self._config.workflow.group_size
        prompts = self.source.columns([record for _, record in found])
        known = await self._put(prompts, [key for key, _ in found], size, batch, "train")
        self.rows_put += len(found) * size
        return known

    async def _write(self, record: dict[str, Any]) -> None:
        """Apply and write down one change, before the store sees it."""
        self.assigned.apply(record)
        if self._note is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._note, record)
            self.notes += 1

    async def _put(
        self,
        prompts: Batch,
        keys: Sequence[GroupKey],
        samples: int,
        batch: int | None,
        partition: str,
    ) -> int:
        """Put groups; how many the store knew."""
        longest = int(prompts["prompt_ids"].lengths.max())
        nbytes = row_bytes(longest, self._config.rollout.sampling.max_new_tokens)
        if partition == "train":
            groups = self._over.started
            check_room(
                await self._store.stats(drops_after=NO_DROPS), self._config.workflow, groups, nbytes
            )
        result = await self._store.put(
            prompts,
            keys=keys,
            samples=samples,
            batch=batch,
            partition=partition,
            row_bytes=nbytes,
        )
        return result.known

    async def _watch_drops(self) -> None:
        while True:
            stats = await self._store.stats(drops_after=self._drops_seen, wait_s=30.0)
            for dropped in stats.dropped_groups:
                self._drops_seen = dropped.serial
                if dropped.batch is not None:  # else its evaluation counts it
                    self._dropped(dropped)
                    await self._replace(dropped, dropped.batch)

    async def _replace(self, dropped: DroppedGroup, batch: int) -> None:
        flow = self._config.workflow
        if batch >= self._version:
            await self._write(dropped_record(batch, [dropped.group]))
        if self._passed(batch):  # perhaps only now, while that was written
            return  # over-sampling: its batch has what it needs
        self._dropped_in_a_row += 1
        limit = 10 * flow.groups_per_step
        if self._dropped_in_a_row > limit:
            raise ServiceError(
                f"{self._dropped_in_a_row} prompt groups were dropped within one step, the last: "
                f"{dropped.reason}; the run would never end{_ADVICE.get(dropped.reason, '')}"
            )
        # The first few tell; hundreds would hide everything else.
        # What a policy throws away is what the user asked for.
        said = self._dropped_in_a_row > _SAID_IN_A_ROW or dropped.reason in _POLICIES
        level = logging.DEBUG if said else logging.WARNING
        _log.log(level, "group %s of batch %d is replaced: %s", *_dropped_words(dropped))
        if flow.too_stale == "requeue" and dropped.reason == TOO_STALE:
            await self._requeue(dropped.group)
        self._admission.replace(batch)
        self._wake.set()

    async def _requeue(self, group: GroupKey) -> None:
        """Let the same prompt take the place of its group, by a key the store does not know."""
        drawn = GroupKey(TRAINING, group.epoch, group.sequence)
        found = await self.source.again([drawn])
        source = _AGAIN if group.source == TRAINING else group.source + 1
        again = GroupKey(source, group.epoch, group.sequence)
        self._again.setdefault(self._version, deque()).append((again, found[drawn]))


def _nothing(dropped: DroppedGroup) -> None:
    del dropped


def _dropped_words(dropped: DroppedGroup) -> tuple[str, int | None, str]:
    """Group, batch and reason, for a log line."""
    return "/".join(map(str, dropped.group)), dropped.batch, dropped.reason
