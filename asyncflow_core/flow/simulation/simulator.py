"""A run on virtual time: what a workflow takes, given what its services take. Pure.

Nothing here decides: admission, pacing, the ledger, the weight protocol and the splitting of
micro-batches are those of a run. Around them stand loops that wait for as long as the work takes.

Source: AsyncFlow (arXiv 2507.01663), whose resource planner simulates the graph of tasks; what it
simulates, and how, is not public.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from asyncflow_core.batch import Key
from asyncflow_core.errors import InvariantError
from asyncflow_core.flow.running.admission import Admission
from asyncflow_core.flow.running.pacing import Pacing
from asyncflow_core.flow.running.status import Bottleneck, WorkerStatus, bottleneck
from asyncflow_core.flow.simulation.clock import Clock
from asyncflow_core.flow.simulation.replica import Replica
from asyncflow_core.flow.simulation.services import Puller, StageWorker
from asyncflow_core.flow.simulation.table import Table
from asyncflow_core.flow.simulation.times import StageTimes, Times
from asyncflow_core.flow.simulation.trainer import Step, Trainer, TrainerSettings
from asyncflow_core.flow.simulation.weights import Weights
from asyncflow_core.flow.simulation.workload import Allocation, Workload
from asyncflow_core.services.data_store import RowInfo, StoreStats, TaskSpec

__all__ = ["Simulated", "simulate"]


@dataclass(frozen=True, slots=True)
class Simulated:
    """What a run would do.

    Attributes:
        step_ends: seconds from the start, of every step.
        step_s: mean wall seconds of the measured steps, those after the first few.
        tokens_per_s: trained, prompts included, in the measured steps.
        staleness_mean, staleness_max: of the rows trained in them, in versions.
        busy: task to the share of the measured time in which its workers worked, their mean.
        waits: share of it that the trainer waited for rows.
        bottleneck: what holds the others up, by the rules of a run's status.
    """

    step_ends: tuple[float, ...]
    step_s: float
    tokens_per_s: float
    staleness_mean: float
    staleness_max: int
    busy: dict[str, float]
    waits: float
    bottleneck: Bottleneck


def simulate(
    work: Workload,
    allocation: Allocation,
    times: Times,
    lengths: Sequence[Sequence[int]],
    *,
    first: int,
) -> Simulated:
    """Run as many steps as there are batches of lengths.

    Args:
        work: what is done.
        allocation: by how many.
        times: what it takes.
        lengths: tokens of the responses of each group, [steps * groups_per_step][group_size].
        first: steps that are not measured: the start of the pipeline.
    """
    run = _Run(work, allocation, times, lengths)
    run.go()
    return run.found(first)


class _Run:
    def __init__(
        self,
        work: Workload,
        allocation: Allocation,
        times: Times,
        lengths: Sequence[Sequence[int]],
    ) -> None:
        flow = work.config.workflow
        self._work = work
        self._times = times
        self._lengths = lengths
        self._steps = len(lengths) // flow.groups_per_step
        self._clock = Clock()
        self._table = Table(self._clock, work.tasks, max_staleness=flow.bound)
        self._admission = Admission(
            groups_per_step=flow.groups_per_step, steps=self._steps, max_staleness=flow.bound
        )
        self._admitted = 0
        self._version = self._opened = 0
        self._opens_at = 0.0
        self._pacing = Pacing(flow.bound)
        self._last_seen: dict[int, float] = {}
        overlaps_export, overlaps_fetch = work.overlaps(allocation.ranks)
        tasks = {task.name: task for task in work.tasks}
        self._replicas = {
            f"rollout-{number}": self._replica(tasks["rollout"], number, allocation.replicas)
            for number in range(allocation.replicas)
        }
        self._stages = {
            name: [
                self._stage(tasks[name], number, times.stages.get(name, StageTimes()))
                for number in range(allocation.workers.get(name, stage.workers))
            ]
            for name, stage in work.config.stages.items()
        }
        self._weights = Weights(
            self._clock, times.weights, self._replicas, overlaps_fetch=overlaps_fetch
        )
        settings = TrainerSettings(
            steps=self._steps,
            groups_per_step=flow.groups_per_step,
            group_size=flow.group_size,
            updates_per_step=flow.updates_per_step,
            micro_batch_tokens=work.config.trainer.micro_batch_tokens,
            ranks=allocation.ranks,
            policy=work.config.trainer.lease_policy,
            whole_batch=work.whole_batch,
            overlaps_export=overlaps_export,
        )
        self._trainer = Trainer(self._clock, self._table, times.trainer, settings, self._stepped)

    def _replica(self, task: TaskSpec, number: int, count: int) -> Replica:
        rollout = self._work.config.rollout
        by_key = self._work.config.workflow.preset == "sequential" and count > 1
        return Replica(
            self._clock,
            self._times.rollout,
            self._length_of,
            self._work.switch_mode,
            self._seen(task),
            table=self._table,
            task=task,
            name=f"rollout-{number}",
            rows_in_flight=rollout.rows_in_flight,
            rows_per_lease=rollout.rows_in_flight,
            policy=rollout.lease_policy,
            share=(number, count) if by_key else None,
        )

    def _stage(self, task: TaskSpec, number: int, times: StageTimes) -> StageWorker:
        stage = self._work.config.stages[task.name]
        return StageWorker(
            self._clock,
            times,
            self._seen(task),
            table=self._table,
            task=task,
            name=f"{task.name}-{number}",
            rows_in_flight=2 * stage.rows,
            rows_per_lease=stage.rows,
            policy=stage.lease_policy,
        )

    def go(self) -> None:
        """To the end of the last step."""
        for puller in self._pullers():
            puller.pull()
        self._trainer.start()
        self._put()
        while len(self._trainer.steps) < self._steps:
            if not self._clock.step():
                done = len(self._trainer.steps)
                raise InvariantError(
                    f"the simulation stands still after {done} of {self._steps} steps"
                )

    def _pullers(self) -> list[Puller]:
        stages = itertools.chain.from_iterable(self._stages.values())
        return [*self._replicas.values(), *stages]

    def _length_of(self, key: Key) -> int:
        return self._lengths[key.sequence][key.sample]

    def _seen(self, task: TaskSpec) -> _Seen:
        """What notes when the recorder could see the last row of a batch."""
        return _Seen(self._clock, self._last_seen if self._work.seen & set(task.writes) else {})

    def _put(self) -> None:
        """Put the groups that may start, a batch at a time, as `Supply` does."""
        places: dict[int, int] = {}
        while (batch := self._admission.next()) is not None:
            places[batch] = places.get(batch, 0) + 1
        for batch, groups in places.items():
            first, self._admitted = self._admitted, self._admitted + groups
            self._table.put(
                first,
                groups,
                columns=self._work.prompt_columns,
                samples=self._work.config.workflow.group_size,
                batch=batch,
                tokens=round(self._times.lengths.prompt),
            )

    def _open(self, version: int) -> None:
        while self._opened < version:
            self._opened += 1
            self._admission.advance(self._opened)
        self._put()

    def _stepped(self, step: Step) -> None:
        """A step is done: what `Steps` and `Supply` do then, in their order."""
        clock, version = self._clock, step.version + 1
        self._opens_at = max(self._opens_at, clock.now + self._pacing.delay_s)
        clock.at(self._opens_at, lambda: self._open(version))
        if version < self._steps:
            self._trainer.exported_at = self._weights.publish(version)
        before = self._trainer.steps[-2].ended if version > 1 else 0.0
        if self._work.config.workflow.pacing:
            self._pacing.stepped(
                slack_s=step.began - self._last_seen.pop(step.version, 0.0),
                waited_s=step.wait_s,
                step_s=step.ended - before,
            )

    def found(self, first: int) -> Simulated:
        """What the steps from `first` on were like."""
        steps = self._trainer.steps
        start, end = steps[first - 1].ended if first else 0.0, steps[-1].ended
        measured = steps[first:]
        wall_s, rows = end - start, sum(step.rows for step in measured)
        waits = sum(step.wait_s for step in measured) / wall_s
        groups: dict[str, Sequence[Puller]] = {
            "rollout": list(self._replicas.values()),
            **self._stages,
        }
        busy = {
            name: sum(p.busy.between(start, end) for p in pullers) / len(pullers) / wall_s
            for name, pullers in groups.items()
        }
        busy["train"] = self._trainer.busy.between(start, end) / wall_s
        shares = dict.fromkeys(busy, 0.0) | {"train": waits}
        workers = [WorkerStatus(name, name, busy[name], shares[name]) for name in busy]
        flow = self._work.config.workflow
        return Simulated(
            step_ends=tuple(step.ended for step in steps),
            step_s=wall_s / len(measured),
            tokens_per_s=sum(step.tokens for step in measured) / wall_s,
            staleness_mean=sum(step.staleness for step in measured) / rows,
            staleness_max=max(step.staleness_max for step in measured),
            busy=busy,
            waits=waits,
            bottleneck=bottleneck(workers, StoreStats(), bound=flow.bound, preset=flow.preset),
        )


@dataclass(slots=True)
class _Seen:
    clock: Clock
    last: dict[int, float]

    def __call__(self, rows: Sequence[RowInfo]) -> None:
        for info in rows:
            if info.batch is not None:
                self.last[info.batch] = self.clock.now
