"""Finding the plugins that a configuration names, and validating their options.

Every fault is collected, so that a user sees all of them at once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from asyncflow_core.config import RunConfig
from asyncflow_core.config_source import ConfigSource
from asyncflow_core.errors import PluginError
from asyncflow_core.flow.planning.checks import CAPABILITIES
from asyncflow_core.registry import Plugin, Registry

__all__ = ["SECTIONS", "Choice", "Chosen"]

SECTIONS = (
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


@dataclass(frozen=True, slots=True)
class Chosen:
    """A plugin with its validated options."""

    plugin: Plugin
    options: BaseModel
    capabilities: Any

    def dump(self) -> dict[str, Any]:
        """The options that were given, as plain values, for a process or a file."""
        return self.options.model_dump(mode="json", exclude_unset=True)


class Choice:
    """The plugins of one configuration, section by section.

    Attributes:
        chosen: section name to plugin; stages as `stages.NAME`, models as `models.NAME`.
        faults: sentences, with the place in the configuration.
        shared: values for every plugin whose options have a field of the name that was left out.
        taken: of those, the names of which a plugin has a field.
    """

    def __init__(
        self,
        source: ConfigSource,
        registry: Registry,
        config: RunConfig | None,
        tree: Mapping[str, Any],
    ) -> None:
        """Look at every section that names a plugin.

        Args:
            source: of the configuration, for the places of faults.
            registry: what there is.
            config: the configuration; None if it has faults of its own.
            tree: the same, as plain values.
        """
        self._source = source
        self._registry = registry
        self.faults: list[str] = []
        self.chosen: dict[str, Chosen] = {}
        self.taken: set[str] = set()
        self.shared = self._shared_values(tree, config)
        self._no_model: Any = object()
        model = None if config is None else config.model
        if model and not os.path.isdir(model):
            self._no_model = model
            self._fault(
                ("model",),
                f"there is no directory {model!r}; give one of this machine that has a model's "
                f"files, for nothing is downloaded by name",
            )
        self._choose_all(tree)

    def _choose_all(self, tree: Mapping[str, Any]) -> None:
        for section in SECTIONS:
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
        self.faults.append(self._source.fault(path, message))

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
        shared = {**self.shared, "frozen": True} if path[0] == "models" else self.shared
        for key in shared.keys() & plugin.options.model_fields.keys():
            self.taken.add(key)
            values.setdefault(key, shared[key])
        if kind == "data_store":
            values = {**self._store_directory(plugin, values), **values}
        bound = self.shared.get("max_staleness")
        if kind == "data_store" and values.get("max_staleness", bound) != bound:
            self._fault(
                (*path, "options", "max_staleness"),
                f"it is the workflow's, {bound}; leave it out here",
            )
        options, faults = self._source.validate(plugin.options, values, (*path, "options"))
        self.faults += faults
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
            self.chosen[".".join(path)] = Chosen(plugin, options, able)


def _named(sections: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """Name and section, of those that are sections at all."""
    found = sections.items() if isinstance(sections, Mapping) else ()
    return [(name, section) for name, section in found if isinstance(section, Mapping)]
