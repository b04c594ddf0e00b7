"""What a step of the trainer is, and what one did so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from asyncflow_core.batch import GroupKey
from asyncflow_core.flow.processes.control import StepReport
from asyncflow_core.flow.running.policies.ready_first import TooStale
from asyncflow_core.flow.running.policies.sorted_rows import staleness
from asyncflow_core.metrics import Means
from asyncflow_core.services.data_store import RowInfo, TaskSpec
from asyncflow_core.services.trainer import LossSpec

__all__ = ["Tally", "TrainSettings"]


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """What a step is.

    Attributes:
        task: what the trainer waits for; whole groups, in the order of steps.
        columns: of its reads, those that the ranks read.
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
    columns: tuple[str, ...]
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
class Tally:
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

    def count_staleness(
        self, version: int, update: int, rows: Sequence[RowInfo], *, updates_per_step: int
    ) -> None:
        """Rows were trained by an update of the step, the first of which is 0."""
        found = [staleness(version, row) for row in rows]
        self.staleness.extend(found)
        in_updates = max(found, default=0) * updates_per_step + update
        self.staleness_updates_max = max(self.staleness_updates_max, in_updates)

    def report(self, version: int) -> StepReport:
        """The step from `version` is done."""
        return StepReport(
            version=version + 1,
            rows=self.rows,
            groups=self.groups,
            tokens=self.tokens,
            updates=self.updates,
            staleness_rows=dict(Counter(self.staleness)),
            staleness_updates_max=self.staleness_updates_max,
            wait_s=self.wait_s,
            busy_s=self.busy_s,
            commit_s=self.commit_s,
            metrics=self.means.pairs(),
            group_keys=self.group_keys,
            rows_masked=self.rows_masked,
            tokens_too_stale=self.tokens_too_stale,
        )
