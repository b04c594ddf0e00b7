"""What is simulated: a plan's workflow and tasks, and how many services of each kind. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from asyncflow_core.config import RunConfig
from asyncflow_core.errors import ConfigError
from asyncflow_core.flow.planning.plan import Plan
from asyncflow_core.services.data_store import TaskSpec
from asyncflow_core.services.rollout import SwitchMode

__all__ = ["Allocation", "Workload"]

_SIMULATED = ("rollout", "train")


@dataclass(frozen=True, slots=True)
class Allocation:
    """How many of each kind.

    Attributes:
        replicas: of the rollout. ranks: of the trainer.
        workers: stage to its workers.
    """

    replicas: int
    ranks: int
    workers: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Workload:
    """A workflow, whatever its services take.

    Attributes:
        config: of the run.
        tasks: rollout, stages, train, in the order of the dataflow; of train only what it waits
            for that one of these writes.
        seen: columns that the recorder waits for.
        switch_mode: how replicas take new weights.
        plan: it comes from.
        left_out: what of the workflow is not simulated, a sentence each.
    """

    config: RunConfig
    tasks: tuple[TaskSpec, ...]
    seen: frozenset[str]
    switch_mode: SwitchMode
    plan: Plan
    left_out: tuple[str, ...] = ()

    @classmethod
    def of(cls, plan: Plan) -> Workload:
        """What a plan does.

        Raises:
            ConfigError: its policies are not simulated.
        """
        config, flow = plan.config, plan.config.workflow
        refused = [
            f"workflow.{name}: a plan is made of runs that train the batches they admit, and "
            f"{name}={getattr(flow, name)} does not; plan with workflow.{name}={value}"
            for name, value in (("order", "batches"), ("extra_groups", 0))
            if getattr(flow, name) != value
        ]
        if refused:
            raise ConfigError(refused)
        left_out = []
        if flow.dynamic_sampling:
            left_out.append("dynamic sampling: no group is thrown away and answered anew")
        if "proximal" in plan.tasks:
            left_out.append("the trainer's forward for proximal_logprobs, but its wait is")
        if config.evaluation is not None and config.evaluation.every:
            left_out.append("evaluation beside training, which takes its share of rollout")
        if config.checkpoint.every:
            left_out.append("checkpoints")
        kept = [*_SIMULATED, *config.stages]
        specs = [task.spec for name, task in plan.tasks.items() if name in kept]
        written = {column for spec in specs for column in spec.writes}
        *before, train = specs
        read = tuple(column for column in train.reads if column in written)
        return cls(
            config,
            (*before, replace(train, reads=read)),
            frozenset(plan.tasks["record"].spec.reads) & written,
            plan.switch_mode,
            plan,
            tuple(left_out),
        )

    @property
    def allocation(self) -> Allocation:
        """That of the configuration itself."""
        workers = {name: stage.workers for name, stage in self.config.stages.items()}
        return Allocation(self.config.rollout.replicas, self.config.trainer.world_size, workers)

    @property
    def prompt_columns(self) -> tuple[str, ...]:
        """What rows come with."""
        written = {column for task in self.tasks for column in task.writes}
        read = dict.fromkeys(column for task in self.tasks for column in task.reads)
        return tuple(column for column in read if column not in written)

    @property
    def whole_batch(self) -> bool:
        """Whether an update waits for its whole share before any of it is computed."""
        return self.config.workflow.preset == "sequential" or "proximal" in self.plan.tasks

    def overlaps(self, ranks: int) -> tuple[bool, bool]:
        """With so many ranks: export beside the next gradients, and staging beside the export."""
        trainer = self.config.trainer.model_copy(update={"world_size": ranks})
        plan = replace(self.plan, config=self.config.model_copy(update={"trainer": trainer}))
        return plan.overlaps_export, plan.overlaps_fetch
