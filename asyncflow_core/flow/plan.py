"""From a configuration to a plan: every plugin found, every option and capability checked.

Nothing is started. `asyncflow doctor` prints what this finds; a run begins with it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from asyncflow_core.config import RunConfig, ServiceConfig, StageConfig
from asyncflow_core.config_source import ConfigSource
from asyncflow_core.errors import AsyncFlowError, ConfigError, PluginError
from asyncflow_core.flow.dataflow import dataflow_faults
from asyncflow_core.flow.stages import function_contract, plugin_contract
from asyncflow_core.flow.work import ROLLOUT_WRITES
from asyncflow_core.parts import StageContract
from asyncflow_core.registry import Plugin, Registry
from asyncflow_core.services.data_store import Order, TaskSpec
from asyncflow_core.services.rollout import RolloutCapabilities, SamplingParams, SwitchMode
from asyncflow_core.services.trainer import LossCapabilities, TrainerCapabilities
from asyncflow_core.services.weight_sync import WeightSyncCapabilities

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

    def plan(self) -> Plan:
        config, faults = self._source.validate(RunConfig, self._source.tree)
        self._faults += faults
        # Plugins are looked at even when another section is wrong: all faults at once.
        tree = self._source.tree if config is None else config.model_dump()
        shared = {"model": self._shared_model(tree)}
        if config is not None:
            flow = config.workflow
            shared["max_staleness"] = flow.bound
            shared["total_updates"] = flow.steps * flow.updates_per_step
        for section in _SECTIONS:
            if isinstance(tree.get(section), Mapping):
                self._choose(section, (section,), tree[section], shared)
        stages = tree.get("stages")
        for name, stage in stages.items() if isinstance(stages, Mapping) else ():
            if isinstance(stage, Mapping) and stage.get("plugin"):
                self._choose("stage", ("stages", name), stage, shared)
        if config is None or self._faults:
            raise ConfigError(self._faults)
        mode = self._switch_mode(config)
        self._check_capabilities(config)
        self._check_processes(config)
        tasks = self._tasks(config)
        if self._faults:
            raise ConfigError(self._faults)
        return Plan(config, self._registry, self._chosen, tasks, mode)

    def _fault(self, path: tuple[str | int, ...], message: str) -> None:
        self._faults.append(self._source.fault(path, message))

    def _shared_model(self, tree: Mapping[str, Any]) -> Any:
        """The model for every plugin that left its own out: the top-level one, or the only one."""
        if tree.get("model"):
            return tree["model"]
        options = [(tree.get(name) or {}).get("options") or {} for name in ("rollout", "trainer")]
        named = {o["model"] for o in options if isinstance(o, Mapping) and o.get("model")}
        return named.pop() if len(named) == 1 else None

    def _choose(
        self,
        kind: str,
        path: tuple[str, ...],
        section: Mapping[str, Any],
        shared: Mapping[str, Any],
    ) -> None:
        try:
            plugin = self._registry.get(kind, str(section.get("plugin", "")))
        except PluginError as error:
            self._fault((*path, "plugin"), str(error))
            return
        values = dict(section.get("options") or {})
        for name, value in shared.items():
            if value is not None and name in plugin.options.model_fields:
                values.setdefault(name, value)
        options, faults = self._source.validate(plugin.options, values, (*path, "options"))
        self._faults += faults
        if options is None:
            return
        if plugin.check is not None:
            for fault in plugin.check(options):
                self._fault((*path, "options"), fault)
        self._chosen[".".join(path)] = Chosen(plugin, options, plugin.capabilities_for(options))

    def _switch_mode(self, config: RunConfig) -> SwitchMode:
        able: RolloutCapabilities = self._chosen["rollout"].capabilities
        wanted = config.rollout.switch_mode
        if wanted == "auto":
            ahead = config.workflow.bound > 0 and SwitchMode.IN_FLIGHT in able.switch_modes
            return SwitchMode.IN_FLIGHT if ahead else SwitchMode.DRAIN
        if wanted not in able.switch_modes:
            self._fault(
                ("rollout", "switch_mode"),
                f"rollout plugin {config.rollout.plugin!r} cannot {wanted}; it can "
                f"{', '.join(sorted(able.switch_modes))}",
            )
        return SwitchMode(wanted)

    def _check_capabilities(self, config: RunConfig) -> None:
        rollout: RolloutCapabilities = self._chosen["rollout"].capabilities
        trainer: TrainerCapabilities = self._chosen["trainer"].capabilities
        loss: LossCapabilities = self._chosen["loss"].capabilities
        weights: WeightSyncCapabilities = self._chosen["weight_sync"].capabilities
        sampling = SamplingParams(**config.rollout.sampling.model_dump())
        defaults = SamplingParams()
        for name in SamplingParams.__dataclass_fields__:
            given = getattr(sampling, name)
            if given != getattr(defaults, name) and name not in rollout.sampling:
                self._fault(
                    ("rollout", "sampling", name),
                    f"rollout plugin {config.rollout.plugin!r} does not honour {name}; it takes "
                    f"{', '.join(sorted(rollout.sampling))}",
                )
        if sampling.truncates and not trainer.truncated_sampling:
            self._fault(
                ("rollout", "sampling"),
                f"trainer plugin {config.trainer.plugin!r} cannot mask truncated sampling as the "
                f"sampler does; leave top_p, top_k and min_p off",
            )
        if weights.source not in rollout.weight_sources:
            self._fault(
                ("weight_sync",),
                f"{config.weight_sync.plugin!r} hands over {weights.source}, but rollout plugin "
                f"{config.rollout.plugin!r} takes {', '.join(sorted(rollout.weight_sources))}",
            )
        locality = self._chosen["launcher"].capabilities.locality
        if locality not in weights.localities:
            self._fault(
                ("weight_sync",),
                f"{config.weight_sync.plugin!r} reaches {', '.join(sorted(weights.localities))}, "
                f"but launcher {config.launcher.plugin!r} puts services a {locality} apart",
            )
        self._check_trainer(config, trainer, loss)

    def _check_trainer(
        self, config: RunConfig, trainer: TrainerCapabilities, loss: LossCapabilities
    ) -> None:
        limit = trainer.max_world_size
        if limit is not None and config.trainer.world_size > limit:
            self._fault(
                ("trainer", "world_size"),
                f"trainer plugin {config.trainer.plugin!r} runs on at most {limit} ranks",
            )
        if loss.arrays != trainer.loss_arrays:
            self._fault(
                ("loss", "plugin"),
                f"loss {config.loss.plugin!r} works on {loss.arrays} arrays, trainer plugin "
                f"{config.trainer.plugin!r} on {trainer.loss_arrays}",
            )
        if loss.needs_entropy and not trainer.entropy:
            self._fault(
                ("loss", "options"),
                f"loss {config.loss.plugin!r} asks for entropy, which trainer plugin "
                f"{config.trainer.plugin!r} does not give",
            )

    def _check_processes(self, config: RunConfig) -> None:
        self._check_process("rollout", config.rollout, config.rollout.replicas, "replicas")
        self._check_process("trainer", config.trainer, config.trainer.world_size, "ranks")
        both = sorted(set(config.rollout.devices) & set(config.trainer.devices))
        if both:
            self._fault(
                ("trainer", "devices"),
                f"devices {both} are given to rollout and trainer; a device serves one of them",
            )

    def _check_process(self, name: str, section: ServiceConfig, shares: int, what: str) -> None:
        if not os.access(section.python, os.X_OK) or os.path.isdir(section.python):
            self._fault((name, "python"), f"there is no interpreter at {section.python!r}")
        devices = section.devices
        if len(set(devices)) < len(devices):
            self._fault((name, "devices"), f"{list(devices)} names a device twice")
        if len(devices) % shares:
            self._fault(
                (name, "devices"), f"{len(devices)} devices do not divide among {shares} {what}"
            )
        if not self._chosen["launcher"].capabilities.processes:
            for field in ("python", "devices"):
                if getattr(section, field) != {"python": sys.executable, "devices": ()}[field]:
                    self._fault(
                        (name, field),
                        f"launcher {self._chosen['launcher'].plugin.name!r} starts no processes, "
                        f"so {field} has no effect; leave it out, or use launcher local",
                    )

    def _tasks(self, config: RunConfig) -> dict[str, TaskSpec]:
        everything = ("train", "eval")
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
            try:
                contract = self._contract(name, stage)
            except AsyncFlowError as error:
                self._fault(("stages", name), str(error))
                continue
            tasks.append(
                TaskSpec(
                    name,
                    contract.reads,
                    contract.writes,
                    contract.whole_groups,
                    contract.partitions,
                )
            )
        reads = dict.fromkeys([*_TRAIN_READS, *self._chosen["loss"].capabilities.reads])
        tasks.append(TaskSpec("train", tuple(reads), (), True, ("train",), Order.STEP))
        written = {column for task in tasks for column in task.writes}
        record = (*_RECORD_READS, *({"reward_error"} & written))
        partitions = everything if config.evaluation else ("train",)
        tasks.append(TaskSpec("record", record, partitions=partitions))
        for fault in dataflow_faults(tasks, self._prompt_columns()):
            self._fault(("stages",), fault)
        return {task.name: task for task in tasks}

    def _contract(self, name: str, stage: StageConfig) -> StageContract:
        chosen = self._chosen.get(f"stages.{name}")
        if chosen is not None:
            return plugin_contract(chosen.plugin, chosen.options)
        return function_contract(stage)

    def _prompt_columns(self) -> Iterable[str]:
        prompts = self._chosen["prompts"]
        return ("prompt_ids", *plugin_contract(prompts.plugin, prompts.options).writes)
