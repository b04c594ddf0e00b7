"""From a configuration to a plan: every plugin found, every option and capability checked.

Nothing is started. `asyncflow doctor` prints what this finds; a run begins with it.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from asyncflow_core.config import RunConfig, StageConfig, with_default_plugins
from asyncflow_core.config_source import ConfigSource
from asyncflow_core.errors import ConfigError, PluginError
from asyncflow_core.flow.planning.checks import CAPABILITIES, capability_faults
from asyncflow_core.flow.planning.dataflow import dataflow_faults
from asyncflow_core.flow.planning.stages import function_contract, plugin_contract
from asyncflow_core.flow.running.filtering import KEPT, filter_task
from asyncflow_core.flow.working.proximal import PROXIMAL, proximal_task
from asyncflow_core.flow.working.work import ROLLOUT_WRITES
from asyncflow_core.parts import StageContract
from asyncflow_core.registry import Plugin, Registry
from asyncflow_core.services.data_store import Order, TaskSpec
from asyncflow_core.services.rollout import RolloutCapabilities, SwitchMode
from asyncflow_core.services.trainer import TrainerCapabilities

__all__ = ["Chosen", "Plan", "make_plan"]

_SECTIONS = (
    "tokenizer",
    "prompts",
    "rollout",
    "trainer",
    "loss",
    "data_store",
    "weight_sync",
    "launcher",
)
"""Sections that choose a plugin of the kind they are named after."""

_TRAIN_READS = ("prompt_ids", "response_ids", "loss_mask", "sampling")
_PLACES = {"rollout": ("rollout",), "train": ("loss", "plugin"), "record": ("stages",)}
"""Where in the configuration the tasks stand that are not stages."""
_RECORD_READS = ("prompt_ids", "response_ids", "reward", "versions", "finish_reason")


@dataclass(frozen=True, slots=True)
class Chosen:
    """A plugin with its validated options."""

    plugin: Plugin
    options: BaseModel
    capabilities: Any

    def dump(self) -> dict[str, Any]:
        """The options that were given, as plain values, for a process or a file."""
        return self.options.model_dump(mode="json", exclude_unset=True)


@dataclass(frozen=True, slots=True)
class Plan:
    """A run that can start.

    Attributes:
        config: what the user wrote, resolved.
        registry: plugins of this process.
        chosen: section name to plugin; stages as `stages.NAME`.
        tasks: task name to what it reads and writes, in the order of the dataflow's definition.
        switch_mode: how replicas take new weights.
    """

    config: RunConfig
    registry: Registry
    chosen: Mapping[str, Chosen]
    tasks: Mapping[str, TaskSpec]
    switch_mode: SwitchMode

    @property
    def overlaps_export(self) -> bool:
        """Whether weights are exported beside the next step's gradients."""
        able: TrainerCapabilities = self.chosen["trainer"].capabilities
        return able.overlapped_export and self.config.trainer.world_size == 1


def make_plan(source: ConfigSource, registry: Registry) -> Plan:
    """Check everything.

    Raises:
        ConfigError: with every fault that was found.
    """
    return _Planner(source, registry).plan()


class _Planner:
    def __init__(self, source: ConfigSource, registry: Registry) -> None:
        self._source = source
        self._registry = registry
        self._faults: list[str] = []
        self._chosen: dict[str, Chosen] = {}
        self._shared: dict[str, Any] = {}
        self._taken: set[str] = set()
        self._unknown = False
        self._no_model: Any = object()

    def plan(self) -> Plan:
        config, faults = self._source.validate(RunConfig, self._source.tree)
        self._faults += faults
        # Plugins are looked at even when another section is wrong: all faults at once.
        tree = with_default_plugins(self._source.tree if config is None else config.model_dump())
        self._shared = self._shared_values(tree, config)
        if config is not None and config.model and not os.path.isdir(config.model):
            self._no_model = config.model
            self._fault(("model",), f"there is no directory {config.model!r}")
        self._choose_all(tree)
        if config is None:
            raise ConfigError(self._faults)
        able = {name: chosen.capabilities for name, chosen in self._chosen.items()}
        for path, message in capability_faults(config, able):
            self._fault(path, message)
        tasks = self._tasks(config)
        if config.model and self._complete(config) and "model" not in self._taken:
            self._fault(("model",), "no chosen plugin takes a model; leave it out")
        if self._faults:
            raise ConfigError(self._faults)
        mode = self._switch_mode(config)
        return Plan(self._resolved(config), self._registry, self._chosen, tasks, mode)

    def _choose_all(self, tree: Mapping[str, Any]) -> None:
        for section in _SECTIONS:
            if isinstance(tree.get(section), Mapping):
                self._choose(section, (section,), tree[section])
        for name, model in _named(tree.get("models")):
            kind = model.get("kind", "trainer")
            if kind in ("trainer", "rollout"):
                self._choose(kind, ("models", name), model)
        for name, stage in _named(tree.get("stages")):
            if stage.get("plugin"):
                self._choose("stage", ("stages", name), stage)

    def _fault(self, path: tuple[str | int, ...], message: str) -> None:
        self._faults.append(self._source.fault(path, message))

    def _shared_values(self, tree: Mapping[str, Any], config: RunConfig | None) -> dict[str, Any]:
        """Values for every plugin whose options have a field of the name that was left out."""
        shared = {"model": self._shared_model(tree)}
        if config is not None:
            flow = config.workflow
            shared["max_staleness"] = flow.bound
            shared["total_updates"] = flow.steps * flow.updates_per_step
        return {name: value for name, value in shared.items() if value is not None}

    def _shared_model(self, tree: Mapping[str, Any]) -> Any:
        """The top-level model, or else the only one that rollout or trainer names."""
        if tree.get("model"):
            return tree["model"]
        named = set()
        for section in (tree.get("rollout"), tree.get("trainer")):
            options = section.get("options") if isinstance(section, Mapping) else None
            model = options.get("model") if isinstance(options, Mapping) else None
            if isinstance(model, str):
                named.add(model)
        return named.pop() if len(named) == 1 else None

    def _choose(self, kind: str, path: tuple[str, ...], section: Mapping[str, Any]) -> None:
        name, given = section.get("plugin"), section.get("options")
        given = {} if given is None else given
        if not isinstance(name, str) or not isinstance(given, Mapping):
            return  # the section's own fault
        try:
            plugin = self._registry.get(kind, name)
        except PluginError as error:
            self._fault((*path, "plugin"), str(error))
            return
        values = dict(given)
        shared = {**self._shared, "frozen": True} if path[0] == "models" else self._shared
        for key in shared.keys() & plugin.options.model_fields.keys():
            self._taken.add(key)
            values.setdefault(key, shared[key])
        if kind == "data_store":
            values = {**self._store_directory(plugin, values), **values}
        bound = self._shared.get("max_staleness")
        if kind == "data_store" and values.get("max_staleness", bound) != bound:
            self._fault(
                (*path, "options", "max_staleness"),
                f"it is the workflow's, {bound}; leave it out here",
            )
        options, faults = self._source.validate(plugin.options, values, (*path, "options"))
        self._faults += faults
        if options is not None:
            self._find_policies(getattr(options, "lease_policies", ()), path)
            self._inspect(plugin, options, path)

    def _find_policies(self, names: Sequence[str], path: tuple[str, ...]) -> None:
        for name in names:
            try:
                self._registry.get("lease_policy", name)
            except PluginError as error:
                self._fault((*path, "options", "lease_policies"), str(error))

    def _store_directory(self, plugin: Plugin, values: Mapping[str, Any]) -> dict[str, str]:
        """A store that is to outlive its processes lies in the run's folder, unless told where."""
        tree, durable = self._source.tree, values.get("durability", "none") != "none"
        if not durable or "directory" not in plugin.options.model_fields:
            return {}
        fields = RunConfig.model_fields
        out, name = (tree.get(key, fields[key].default) for key in ("out", "name"))
        return {"directory": str(Path(str(out), str(name)).resolve() / "store")}

    def _inspect(self, plugin: Plugin, options: BaseModel, path: tuple[str, ...]) -> None:
        """Ask the plugin what it makes of its options."""
        origin = f"{plugin.label} of {plugin.distribution}"
        # Each would say again that the run's model is not there.
        checked = plugin.check is not None and getattr(options, "model", None) != self._no_model
        try:
            faults = list(plugin.check(options)) if plugin.check and checked else []
            able = plugin.capabilities_for(options)
        except Exception as error:  # noqa: BLE001 - a plugin's code may do anything
            faults, able = [f"{origin} failed: {type(error).__name__}: {error}"], None
        else:
            record = CAPABILITIES.get(plugin.kind)
            if record is not None and not isinstance(able, record):
                faults.append(f"{origin} is registered without {record.__name__}")
        for fault in faults:
            self._fault((*path, "options"), fault)
        if not faults:
            self._chosen[".".join(path)] = Chosen(plugin, options, able)

    def _complete(self, config: RunConfig) -> bool:
        """Whether every plugin was found and is sound."""
        stages = [f"stages.{name}" for name, stage in config.stages.items() if stage.plugin]
        models = [f"models.{name}" for name in config.models]
        return self._chosen.keys() >= {*_SECTIONS, *stages, *models}

    def _switch_mode(self, config: RunConfig) -> SwitchMode:
        wanted = config.rollout.switch_mode
        if wanted != "auto":
            return SwitchMode(wanted)
        able: RolloutCapabilities = self._chosen["rollout"].capabilities
        mixes = config.workflow.preset == "async" and config.workflow.bound > 0
        ahead = mixes and SwitchMode.IN_FLIGHT in able.switch_modes
        return SwitchMode.IN_FLIGHT if ahead else SwitchMode.DRAIN

    def _resolved(self, config: RunConfig) -> RunConfig:
        """The configuration with options as validated (paths whole), without those shared out."""

        def part(section: Any, chosen: Chosen) -> Any:
            options = {
                name: value
                for name, value in chosen.dump().items()
                if name not in (*self._shared, "directory") or name in section.options
            }
            return section.model_copy(update={"options": options})

        updates = {name: part(getattr(config, name), self._chosen[name]) for name in _SECTIONS}
        stages = {
            name: part(stage, self._chosen[f"stages.{name}"]) if stage.plugin else stage
            for name, stage in config.stages.items()
        }
        models = {
            name: part(model, self._chosen[f"models.{name}"])
            for name, model in config.models.items()
        }
        return config.model_copy(update={**updates, "models": models, "stages": stages})

    def _tasks(self, config: RunConfig) -> dict[str, TaskSpec]:
        everything = ("train", "eval")
        flow = config.workflow
        turns = flow.groups_per_step if flow.preset == "sequential" else 0
        tasks = [
            TaskSpec(
                "rollout",
                ("prompt_ids",),
                ROLLOUT_WRITES,
                partitions=everything,
                order=Order.ADMITTED,
            )
        ]
        for name, stage in config.stages.items():
            contract = self._contract(name, stage, config)
            self._unknown |= contract is None
            if contract is not None:
                tasks.append(
                    TaskSpec(
                        name,
                        contract.reads,
                        contract.writes,
                        contract.whole_groups or bool(turns),
                        contract.partitions,
                        batch_groups=turns if "train" in contract.partitions else 0,
                    )
                )
        loss, prompts = self._chosen.get("loss"), self._prompt_columns()
        reads = dict.fromkeys([*_TRAIN_READS, *(loss.capabilities.reads if loss else ())])
        written = {column for task in tasks for column in task.writes}
        if PROXIMAL in reads and PROXIMAL not in written:
            # At a step's only update they are the current ones, which the loss has.
            if flow.updates_per_step == 1:
                del reads[PROXIMAL]
            else:
                tasks.append(proximal_task(turns))
        if flow.dynamic_sampling:
            tasks.append(filter_task(turns))
            reads[KEPT] = None
        order = Order.STEP if flow.order == "batches" else Order.ADMITTED
        train = TaskSpec("train", tuple(reads), (), True, ("train",), order, turns)
        tasks.append(train)
        written = {column for task in tasks for column in task.writes}
        record = (*_RECORD_READS, *sorted({"reward_error", KEPT} & written))
        partitions = everything if config.evaluation else ("train",)
        tasks.append(TaskSpec("record", record, partitions=partitions))
        # With a task or the prompts unknown, every column of theirs would be a fault, too.
        if prompts is not None and not self._unknown:
            for fault in dataflow_faults(tasks, prompts):
                self._fault(_PLACES.get(fault.task, ("stages", fault.task)), fault.message)
        return {task.name: task for task in tasks}

    def _uses_model(self, name: str, stage: StageConfig, config: RunConfig) -> bool:
        model = config.models.get(stage.model)
        if model is None:
            near = difflib.get_close_matches(stage.model, config.models, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            there = ", ".join(config.models) or "none"
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

    def _contract(self, name: str, stage: StageConfig, config: RunConfig) -> StageContract | None:
        """What a stage reads and writes; None if that is not known, which is a fault."""
        if stage.model and not self._uses_model(name, stage, config):
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


def _named(sections: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """Name and section, of those that are sections at all."""
    found = sections.items() if isinstance(sections, Mapping) else ()
    return [(name, section) for name, section in found if isinstance(section, Mapping)]
