"""The trainer of a simulated run: the loop of `TrainWorker`, on virtual time. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from asyncflow_core.flow.simulation.clock import Clock
from asyncflow_core.flow.simulation.services import Busy
from asyncflow_core.flow.simulation.table import Table
from asyncflow_core.flow.simulation.times import TrainerTimes
from asyncflow_core.flow.working.micro_batches import split
from asyncflow_core.services.data_store import Lease, RowInfo

__all__ = ["Step", "Trainer", "TrainerSettings"]


@dataclass(slots=True)
class Step:
    """What one step did.

    Attributes:
        version: completed steps before it.
        began, ended: seconds.
        wait_s: for rows.
        rows, tokens: trained.
        staleness: summed over rows, in versions. staleness_max: over rows.
    """

    version: int
    began: float
    ended: float = 0.0
    wait_s: float = 0.0
    rows: int = 0
    tokens: int = 0
    staleness: int = 0
    staleness_max: int = 0

    def trained(self, rows: list[RowInfo]) -> None:
        """Count rows of an update."""
        ages = [self.version - (info.oldest_version or 0) for info in rows]
        self.rows += len(rows)
        self.tokens += sum(info.tokens for info in rows)
        self.staleness += sum(ages)
        self.staleness_max = max(self.staleness_max, *ages)


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """As `TrainSettings`, as far as it takes time.

    Attributes:
        ranks: of the trainer. micro_batch_tokens: of one of them.
        whole_batch: an update waits for all of its share.
        overlaps_export: weights leave beside the next gradients, and only an update waits.
    """

    steps: int
    groups_per_step: int
    group_size: int
    updates_per_step: int
    micro_batch_tokens: int
    ranks: int
    policy: str
    whole_batch: bool
    overlaps_export: bool


@dataclass(slots=True)
class Trainer:
    """Trains batch after batch; `stepped` is told of each, and starts what follows from it.

    Attributes:
        steps: that are done.
        busy: seconds in the trainer's calls, as a run counts them.
        exported_at: when the last export ends.
    """

    clock: Clock
    table: Table
    times: TrainerTimes
    settings: TrainerSettings
    stepped: Callable[[Step], None]
    steps: list[Step] = field(default_factory=list)
    busy: Busy = field(default_factory=Busy)
    exported_at: float = 0.0

    def start(self) -> None:
        """Begin with the first step."""
        self._go_on(self._run())

    def _go_on(self, work: Iterator[float | None]) -> None:
        """Until it waits: for seconds, or, None, for rows."""
        wait = next(work, -1.0)
        if wait is None:
            self.table.wait("train", lambda: self._go_on(work))
        elif wait >= 0.0:
            self.clock.after(wait, lambda: self._go_on(work))

    def _run(self) -> Iterator[float | None]:
        for version in range(self.settings.steps):
            step = Step(version, self.clock.now)
            for _ in range(self.settings.updates_per_step):
                yield from self._update(step)
            yield self.times.step_s
            step.ended = self.clock.now
            self.steps.append(step)
            self.stepped(step)
            if not self.settings.overlaps_export:
                yield max(0.0, self.exported_at - self.clock.now)

    def _update(self, step: Step) -> Iterator[float | None]:
        held: list[tuple[Lease, list[RowInfo]]] = []
        yield from self._gradients(step, held)
        exporting = max(0.0, self.exported_at - self.clock.now)
        yield from self._work(exporting + self.times.update_s)
        for lease, rows in held:
            step.trained(rows)
            self.table.commit(lease, rows)

    def _gradients(
        self, step: Step, held: list[tuple[Lease, list[RowInfo]]]
    ) -> Iterator[float | None]:
        """Of an update's share, as rows become ready."""
        settings = self.settings
        share = settings.groups_per_step // settings.updates_per_step
        enough = settings.micro_batch_tokens * settings.ranks
        todo: list[RowInfo] = []
        groups = 0
        while True:
            complete = groups >= share
            ready = sum(info.tokens for info in todo)
            if not complete and (settings.whole_batch or ready < enough):
                before = self.clock.now
                while (lease := self._lease(step.version, share - groups)) is None:
                    yield None
                step.wait_s += self.clock.now - before
                rows = list(lease.rows)
                held.append((lease, rows))
                todo += rows
                groups += len({info.key.group for info in rows})
                continue
            parts = split(
                [info.tokens for info in todo],
                ranks=settings.ranks,
                limit_tokens=settings.micro_batch_tokens,
            )
            token_s = self.times.rank_token_s(settings.ranks)
            for part in parts:
                longest = max(sum(todo[at].tokens for at in indices) for indices in part)
                yield from self._work(longest * token_s)
            todo = []
            if complete:
                return

    def _lease(self, version: int, groups: int) -> Lease | None:
        return self.table.lease(
            "train",
            "trainer",
            version=version,
            limit_rows=groups * self.settings.group_size,
            policy=self.settings.policy,
        )

    def _work(self, seconds: float) -> Iterator[float | None]:
        self.busy.add(self.clock.now, self.clock.now + seconds)
        yield seconds
