"""The tasks of a run: what each reads and writes, as configuration and plugins say. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from asyncflow_core.config import RunConfig, StageConfig
from asyncflow_core.errors import ConfigError
from asyncflow_core.flow.planning.choosing import Chosen
from asyncflow_core.flow.planning.dataflow import dataflow_faults
from asyncflow_core.flow.planning.stages import function_contract, plugin_contract
from asyncflow_core.flow.planning.turns import in_turns
from asyncflow_core.flow.running.filtering import KEPT, filter_task
from asyncflow_core.flow.working.proximal import PROXIMAL, proximal_task
from asyncflow_core.flow.working.work import ROLLOUT_WRITES
from asyncflow_core.parts import StageContract
from asyncflow_core.services.data_store import Order, TaskSpec

__all__ = ["Task", "Tasks"]

_TRAIN_READS = ("prompt_ids", "response_ids", "loss_mask", "sampling")
_RECORD_READS = ("prompt_ids", "response_ids", "reward", "versions", "finish_reason")
_PLACES = {"rollout": ("rollout",), "train": ("loss", "plugin"), "record": ("stages",)}
"""Where in the configuration the tasks stand that are not stages."""
_ALL = ("train", "eval")


@dataclass(frozen=True, slots=True)
class Task:
    """A task of a run.

    Attributes:
        spec: what the store sees.
        columns: of its reads, those that its work is given; for the others it only waits.
    """

    spec: TaskSpec
    columns: tuple[str, ...]


class Tasks:
    """Makes the tasks of one configuration; a fault is told, and leaves something out."""

    def __init__(
        self,
        config: RunConfig,
        chosen: Mapping[str, Chosen],
        fault: Callable[[tuple[str | int, ...], str], None],
    ) -> None:
        """Take a configuration, the plugins that were found, and who is told of faults."""
        self._config = config
        self._chosen = chosen
        self._fault = fault

    def make(self) -> dict[str, Task]:
        """By name, in the order of the dataflow's definition."""
        flow, faults = self._config.workflow, True
        stages = self._stages()
        tasks = self._with_trainer([self._rollout(), *filter(None, stages)])
        tasks.append(self._record(tasks))
        prompts = self._prompt_columns()
        # With a task or the prompts unknown, every column of theirs would be a fault, too.
        if prompts is not None and None not in stages:
            found = dataflow_faults(tasks, prompts)
            for fault in found:
                self._fault(_PLACES.get(fault.task, ("stages", fault.task)), fault.message)
            faults = bool(found)
        columns = {task.name: task.reads for task in tasks}
        if flow.preset == "sequential" and not faults:
            tasks = [*in_turns(tasks[:-1], flow.groups_per_step), tasks[-1]]
        return {task.name: Task(task, columns[task.name]) for task in tasks}

    def _rollout(self) -> TaskSpec:
        return TaskSpec(
            "rollout", ("prompt_ids",), ROLLOUT_WRITES, partitions=_ALL, order=Order.ADMITTED
        )

    def _stages(self) -> list[TaskSpec | None]:
        """None for one of which it is not known what it reads and writes."""
        return [self._stage(name, stage) for name, stage in self._config.stages.items()]

    def _stage(self, name: str, stage: StageConfig) -> TaskSpec | None:
        found = self._contract(name, stage)
        if found is None:
            return None
        return TaskSpec(name, found.reads, found.writes, found.whole_groups, found.partitions)

    def _with_trainer(self, tasks: Sequence[TaskSpec]) -> list[TaskSpec]:
        """These, then the trainer's: what the loss and the policies ask for, and last `train`."""
        tasks, flow, loss = list(tasks), self._config.workflow, self._chosen.get("loss")
        reads = dict.fromkeys([*_TRAIN_READS, *(loss.capabilities.reads if loss else ())])
        if PROXIMAL in reads and PROXIMAL not in _written(tasks):
            # At a step's only update they are the current ones, which the loss has.
            if flow.updates_per_step == 1:
                del reads[PROXIMAL]
            else:
                tasks.append(proximal_task())
        if flow.dynamic_sampling:
            tasks.append(filter_task(errors="reward_error" in _written(tasks)))
            reads[KEPT] = None
        order = Order.STEP if flow.order == "batches" else Order.ADMITTED
        return [*tasks, TaskSpec("train", tuple(reads), (), True, ("train",), order)]

    def _record(self, tasks: Sequence[TaskSpec]) -> TaskSpec:
        reads = (*_RECORD_READS, *sorted({"reward_error", KEPT} & _written(tasks)))
        return TaskSpec("record", reads, partitions=_ALL if self._config.evaluation else ("train",))

    def _uses_model(self, name: str, stage: StageConfig) -> bool:
        model = self._config.models.get(stage.model)
        if model is None:
            near = difflib.get_close_matches(stage.model, self._config.models, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            there = ", ".join(self._config.models) or "none"
            self._fault(
                ("stages", name, "model"),
                f"there is no {stage.model!r} under models (there are: {there}){hint}",
            )
        elif bool(stage.function) == (model.kind == "trainer"):
            want = "no function" if model.kind == "trainer" else "a function f(batch, model)"
            self._fault(
                ("stages", name), f"model {stage.model!r} is of kind {model.kind}: it takes {want}"
            )
        else:
            return True
        return False

    def _contract(self, name: str, stage: StageConfig) -> StageContract | None:
        """What a stage reads and writes; None if that is not known, which is a fault."""
        if stage.model and not self._uses_model(name, stage):
            return None
        try:
            if not stage.plugin:
                return function_contract(stage)
            chosen = self._chosen.get(f"stages.{name}")
            return plugin_contract(chosen.plugin, chosen.options) if chosen else None
        except ConfigError as error:
            self._fault(("stages", name, "function" if stage.function else "plugin"), str(error))
            return None

    def _prompt_columns(self) -> tuple[str, ...] | None:
        prompts = self._chosen.get("prompts")
        if prompts is None:
            return None
        try:
            return ("prompt_ids", *plugin_contract(prompts.plugin, prompts.options).writes)
        except ConfigError as error:
            self._fault(("prompts", "plugin"), str(error))
            return None


def _written(tasks: Sequence[TaskSpec]) -> set[str]:
    return {column for task in tasks for column in task.writes}
