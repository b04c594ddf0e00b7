"""From a configuration to a plan: every plugin found, every option and capability checked.

Nothing is started. `asyncflow doctor` prints what this finds; a run begins with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncflow_core.config import RunConfig, with_default_plugins
from asyncflow_core.config_source import ConfigSource
from asyncflow_core.errors import ConfigError
from asyncflow_core.flow.planning.checks import capability_faults
from asyncflow_core.flow.planning.choosing import SECTIONS, Choice, Chosen
from asyncflow_core.flow.planning.tasks import Task, Tasks
from asyncflow_core.registry import Registry
from asyncflow_core.services.rollout import RolloutCapabilities, SwitchMode
from asyncflow_core.services.trainer import TrainerCapabilities
from asyncflow_core.services.weight_sync import WeightSyncCapabilities

__all__ = ["Plan", "make_plan"]


@dataclass(frozen=True, slots=True)
class Plan:
    """A run that can start.

    Attributes:
        config: what the user wrote, resolved.
        registry: plugins of this process.
        chosen: section name to plugin; stages as `stages.NAME`.
        tasks: by name, in the order of the dataflow's definition.
        switch_mode: how replicas take new weights.
    """

    config: RunConfig
    registry: Registry
    chosen: Mapping[str, Chosen]
    tasks: Mapping[str, Task]
    switch_mode: SwitchMode

    @property
    def overlaps_export(self) -> bool:
        """Whether weights are exported beside the next step's gradients."""
        able: TrainerCapabilities = self.chosen["trainer"].capabilities
        return able.overlapped_export and self.config.trainer.world_size == 1

    @property
    def overlaps_fetch(self) -> bool:
        """Whether replicas stage a version while the trainer, one rank of it, exports it."""
        able: TrainerCapabilities = self.chosen["trainer"].capabilities
        weights: WeightSyncCapabilities = self.chosen["weight_sync"].capabilities
        sharded = able.sharded_export and self.config.trainer.world_size > 1
        return weights.overlapped_fetch and not sharded


def make_plan(source: ConfigSource, registry: Registry) -> Plan:
    """Check everything.

    Raises:
        ConfigError: with every fault that was found.
    """
    config, faults = source.validate(RunConfig, source.tree)
    # Plugins are looked at even when another section is wrong: all faults at once.
    tree = with_default_plugins(source.tree if config is None else config.model_dump())
    choice = Choice(source, registry, config, tree)
    faults += choice.faults
    if config is None:
        raise ConfigError(faults)

    def fault(path: tuple[str | int, ...], message: str) -> None:
        faults.append(source.fault(path, message))

    chosen = choice.chosen
    able = {name: found.capabilities for name, found in chosen.items()}
    for path, message in capability_faults(config, able):
        fault(path, message)
    tasks = Tasks(config, chosen, fault).make()
    if config.model and _complete(config, chosen) and "model" not in choice.taken:
        fault(("model",), "no chosen plugin takes a model; leave it out")
    if faults:
        raise ConfigError(faults)
    resolved = _resolved(config, choice)
    return Plan(resolved, registry, chosen, tasks, _switch_mode(config, chosen))


def _complete(config: RunConfig, chosen: Mapping[str, Chosen]) -> bool:
    """Whether every plugin was found and is sound."""
    stages = [f"stages.{name}" for name, stage in config.stages.items() if stage.plugin]
    models = [f"models.{name}" for name in config.models]
    return chosen.keys() >= {*SECTIONS, *stages, *models}


def _switch_mode(config: RunConfig, chosen: Mapping[str, Chosen]) -> SwitchMode:
    wanted = config.rollout.switch_mode
    if wanted != "auto":
        return SwitchMode(wanted)
    able: RolloutCapabilities = chosen["rollout"].capabilities
    mixes = config.workflow.preset == "async" and config.workflow.bound > 0
    ahead = mixes and SwitchMode.IN_FLIGHT in able.switch_modes
    return SwitchMode.IN_FLIGHT if ahead else SwitchMode.DRAIN


def _resolved(config: RunConfig, choice: Choice) -> RunConfig:
    """The configuration with options as validated (paths whole), without those shared out."""

    def part(section: Any, chosen: Chosen) -> Any:
        options = {
            name: value
            for name, value in chosen.dump().items()
            if name not in (*choice.shared, "directory") or name in section.options
        }
        return section.model_copy(update={"options": options})

    updates = {name: part(getattr(config, name), choice.chosen[name]) for name in SECTIONS}
    stages = {
        name: part(stage, choice.chosen[f"stages.{name}"]) if stage.plugin else stage
        for name, stage in config.stages.items()
    }
    models = {
        name: part(model, choice.chosen[f"models.{name}"]) for name, model in config.models.items()
    }
    return config.model_copy(update={**updates, "models": models, "stages": stages})
