"""What the controller asks of the processes of a run: the interfaces that cross the wire.

A rollout process answers `RolloutControl`, the first rank of a trainer `TrainerControl`, every
further rank `RankControl`, a stage's process `StageControl`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from asyncflow_core.batch import Batch, BatchRef, GroupKey, Key
from asyncflow_core.services.rollout import RolloutStats, StagedWeights, SwitchMode
from asyncflow_core.services.trainer import ForwardBackwardInfo, LossSpec, UpdateInfo
from asyncflow_core.services.weight_sync import PublishedWeights

__all__ = [
    "RankControl",
    "RolloutControl",
    "StageControl",
    "StepReport",
    "TrainerControl",
    "WorkStats",
]


@dataclass(frozen=True, slots=True)
class StepReport:
    """One trained global batch.

    Attributes:
        version: completed steps, this one included.
        rows, groups, tokens: trained in it; tokens include prompts.
        group_keys: of the groups that counted for it.
        rows_masked: counted for it without being trained.
        tokens_too_stale: response tokens of rows that were too old for it.
        updates: optimizer updates since the first, this step's included.
        staleness_rows: staleness in versions to rows.
        staleness_updates_max: over rows, in optimizer updates.
        wait_s: seconds waiting for rows. busy_s: inside the trainer. commit_s: acknowledging.
        metrics: name to (sum, weight).
    """

    version: int
    rows: int
    groups: int
    tokens: int
    updates: int
    staleness_rows: dict[int, int]
    staleness_updates_max: int
    wait_s: float
    busy_s: float
    commit_s: float
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    group_keys: list[GroupKey] = field(default_factory=list)
    rows_masked: int = 0
    tokens_too_stale: int = 0

    @property
    def staleness_sum(self) -> int:
        """Over rows, in versions."""
        return sum(staleness * rows for staleness, rows in self.staleness_rows.items())

    @property
    def staleness_max(self) -> int:
        """Over rows, in versions."""
        return max(self.staleness_rows, default=0)


@dataclass(frozen=True, slots=True)
class WorkStats:
    """What a worker has done since it started.

    Attributes:
        busy_s: seconds it worked on rows. wait_s: seconds it waited for rows.
        rows: finished. held: that it holds now, unfinished.
        costs: what rows and tokens cost, see `flow.working.costs`; empty of the trainer.
    """

    busy_s: float
    wait_s: float
    rows: int
    held: int = 0
    costs: tuple[float, ...] = ()


class StageControl(ABC):
    """A process that works on a task of the store."""

    @abstractmethod
    async def start(self) -> None:
        """Register the task and begin to pull; returns when the task is registered."""

    @abstractmethod
    async def work(self) -> WorkStats:
        """What its worker has done so far; answered at once, whatever the worker does."""


class RolloutControl(StageControl):
    """A rollout replica with its worker."""

    @abstractmethod
    async def stage(self, published: PublishedWeights) -> StagedWeights:
        """Fetch a version and stage it beside the one that serves."""

    @abstractmethod
    async def commit(self, version: int, mode: SwitchMode) -> None:
        """Let the staged version serve; the worker leases with it from then on."""

    @abstractmethod
    async def compare(self, published: PublishedWeights) -> str:
        """Compare what serves with what was published; the first difference, or nothing."""

    @abstractmethod
    async def abort(self, keys: Sequence[Key]) -> int:
        """Stop these responses, which nobody wants any more; how many were running."""

    @abstractmethod
    async def stats(self) -> RolloutStats:
        """Load and work of the replica."""


class TrainerControl(StageControl):
    """The first rank of a trainer, which leases for all and repeats every call to all."""

    @abstractmethod
    async def publish(self, version: int, life: int) -> PublishedWeights:
        """Export the weights as they are and make them fetchable as `version`."""

    @abstractmethod
    async def coming(self, version: int, life: int) -> PublishedWeights | None:
        """What can be fetched of a version while `publish` is under way; None if nothing can."""

    @abstractmethod
    async def step(self, version: int) -> StepReport:
        """Train global batch `version`: the step from `version` to `version + 1`."""

    @abstractmethod
    async def retire(self, version: int, life: int) -> None:
        """No replica will fetch this version again."""

    @abstractmethod
    async def save(self, path: str) -> None:
        """Write a checkpoint of all ranks into a new directory."""

    @abstractmethod
    async def load(self, path: str) -> None:
        """Go on from a checkpoint."""

    @abstractmethod
    async def save_model(self, path: str) -> bool:
        """Write a Hugging Face model directory; False if the trainer cannot."""


class RankControl(ABC):
    """One rank of a trainer. `order` numbers the calls: all ranks get the same, in one order."""

    @abstractmethod
    async def forward(self, order: int, rows: Sequence[BatchRef], columns: Sequence[str]) -> Batch:
        """Read this rank's rows itself; the trainer's columns of them, in that order.

        A rank without rows takes part all the same.
        """

    @abstractmethod
    async def forward_backward(
        self,
        order: int,
        rows: Sequence[BatchRef],
        columns: Sequence[str],
        loss: LossSpec,
        *,
        last: bool,
    ) -> ForwardBackwardInfo:
        """Read this rank's rows itself and add their gradient; no rows is an empty micro-batch."""

    @abstractmethod
    async def optim_step(self, order: int) -> UpdateInfo:
        """Update."""

    @abstractmethod
    async def zero_grad(self, order: int) -> None:
        """Throw collected gradients away."""

    @abstractmethod
    async def export(self, order: int, version: int, life: int) -> PublishedWeights | None:
        """Take part in an export; what this rank published of it, if it yields anything."""

    @abstractmethod
    async def retire(self, version: int, life: int) -> None:
        """No replica will fetch this version again. Ranks need not be in step for it."""

    @abstractmethod
    async def save(self, order: int, path: str) -> None:
        """Take part in a checkpoint."""

    @abstractmethod
    async def load(self, order: int, path: str) -> None:
        """Take part in loading one."""

    @abstractmethod
    async def save_model(self, order: int, path: str) -> bool:
        """Take part in writing a Hugging Face model directory; False if the trainer cannot."""
