"""Finding plugins: entry points by name, each module imported once, failures loud.

An entry point of the group `asyncflow` is called `<kind>.<name>` and names a module that implements
`asyncflow_register`. Kind, name, duplicates and near names come from metadata alone.
`ASYNCFLOW_PLUGINS=a,b` restricts discovery to these distributions (empty: none but core).
"""

from __future__ import annotations

import difflib
import importlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pluggy
from pydantic import BaseModel, ConfigDict, ValidationError

from asyncflow_core import hookspecs
from asyncflow_core.errors import (
    ConfigError,
    PluginConflictError,
    PluginError,
    PluginIncompatibleError,
    PluginLoadError,
    PluginNotFoundError,
)
from asyncflow_core.parts import PartContext, StageContract

if TYPE_CHECKING:
    from asyncflow_core.ledger import LeasePolicy

__all__ = [
    "API_VERSIONS",
    "KINDS",
    "NoOptions",
    "Plugin",
    "PluginEntry",
    "Registrar",
    "Registry",
    "discover",
]

API_VERSIONS = {
    "data_store": 1,
    "rollout": 1,
    "trainer": 1,
    "weight_sync": 1,
    "launcher": 1,
    "tokenizer": 1,
    "prompts": 1,
    "stage": 1,
    "loss": 1,
    "lease_policy": 1,
}
"""Version of each kind's contract; a plugin written for this or the one before is taken."""

KINDS = tuple(API_VERSIONS)

_logger = logging.getLogger(__name__)

_CORE = "asyncflow-core"
_KNOWN = {
    "rollout.sglang": "asyncflow-sglang",
    "rollout.transformers": "asyncflow-transformers",
    "tokenizer.huggingface": "asyncflow-transformers",
    "trainer.hzp": "asyncflow-hzp",
    "data_store.zmq": "asyncflow-store-zmq",
    "weight_sync.host": "asyncflow-weights-host",
    "weight_sync.zmq": "asyncflow-weights-host",
    "weight_sync.disk": "asyncflow-weights-host",
    "weight_sync.collective": "asyncflow-weights-collective",
    "loss.ppo_clip": "asyncflow-algorithms",
    "loss.tis": "asyncflow-algorithms",
    "stage.grpo": "asyncflow-algorithms",
    "stage.exact_match": "asyncflow-rewards",
    "stage.reasoning_gym": "asyncflow-rewards",
    "prompts.reasoning_gym": "asyncflow-rewards",
}
"""Where the project's own plugins live, for the pip line in an error; only what exists in this
tree, so that an error never sends anyone to a name that somebody else may claim."""


class NoOptions(BaseModel):
    """Options of a plugin that has none."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, slots=True)
class PluginEntry:
    """An entry point, from metadata alone."""

    kind: str
    name: str
    module: str
    distribution: str
    version: str

    @property
    def label(self) -> str:
        """`kind.name`."""
        return f"{self.kind}.{self.name}"


@dataclass(frozen=True, slots=True)
class Plugin:
    """An offer: how to build the thing, and what is known of it without building it.

    Attributes:
        kind, name: what a configuration says.
        factory: called with (options, context); returns the service or part.
        options: pydantic model that validates the options; its fields are documented there.
        capabilities: the kind's capability record, None where the kind has none; a callable takes
            the options.
        contract: what a stage reads and writes, or prompts write beside `prompt_ids`; a callable
            takes the options.
        check: returns the faults of some options that can be seen without starting anything.
        distribution: where it comes from, "(python)" when registered by hand.
    """

    kind: str
    name: str
    factory: Callable[[Any, Any], Any]
    options: type[BaseModel] = NoOptions
    capabilities: Any = None
    contract: StageContract | Callable[[Any], StageContract] | None = None
    check: Callable[[Any], Iterable[str]] | None = None
    distribution: str = "(python)"

    @property
    def label(self) -> str:
        """`kind.name`."""
        return f"{self.kind}.{self.name}"

    def capabilities_for(self, options: BaseModel) -> Any:
        """The capability record under these options; None where the kind has none."""
        return self.capabilities(options) if callable(self.capabilities) else self.capabilities

    def parse_options(self, options: Mapping[str, Any]) -> BaseModel:
        """The validated options; `ConfigError` with every fault, named by plugin and option."""
        try:
            return self.options.model_validate(dict(options))
        except ValidationError as error:
            from asyncflow_core.config_source import ConfigSource  # only now: it reads YAML

            _, faults = ConfigSource.from_values({}).validate(self.options, dict(options))
            what = ", option " if all(detail["loc"] for detail in error.errors()) else ": "
            raise ConfigError([f"{self.label}{what}{fault}" for fault in faults]) from None


class Registrar:
    """Takes the offers of one plugin module; handed to `asyncflow_register`."""

    def __init__(self, distribution: str) -> None:
        """Collect offers of one distribution."""
        self._distribution = distribution
        self.plugins: dict[str, Plugin] = {}

    def add(
        self,
        kind: str,
        name: str,
        factory: Callable[[Any, Any], Any],
        *,
        api_version: int,
        options: type[BaseModel] = NoOptions,
        capabilities: Any = None,
        contract: StageContract | Callable[[Any], StageContract] | None = None,
        check: Callable[[Any], Iterable[str]] | None = None,
    ) -> None:
        """Offer one thing; the arguments are those of `Plugin`.

        Raises:
            PluginError: an unknown kind, a name offered twice, a factory or options of no use.
            PluginIncompatibleError: written for another version of the kind's contract.
        """
        if kind not in API_VERSIONS:
            raise PluginError(
                f"plugin {name!r} of {self._distribution} has the kind {kind!r}; "
                f"kinds are {', '.join(KINDS)}"
            )
        who = f"{kind} plugin {name!r} of {self._distribution}"
        if not callable(factory):
            raise PluginError(
                f"{who} has the factory {factory!r}, which cannot be called; give a class or a "
                f"function of (options, context)"
            )
        if not _is_model(options):
            raise PluginError(
                f"{who} has the options {options!r}; give a pydantic model, a subclass of "
                f"asyncflow_core.config.Section"
            )
        ours = API_VERSIONS[kind]
        taken = " or ".join(str(version) for version in (ours, ours - 1) if version)
        if api_version not in (ours, ours - 1):
            newer = api_version > ours
            upgrade = _CORE if newer else self._distribution
            raise PluginIncompatibleError(
                f"{who} is written for API version "
                f"{api_version}, this core has {ours} and takes {taken}; "
                f"try: pip install --upgrade {upgrade}"
            )
        plugin = Plugin(
            kind, name, factory, options, capabilities, contract, check, self._distribution
        )
        if plugin.label in self.plugins:
            raise PluginConflictError(f"{self._distribution} offers {plugin.label!r} twice")
        self.plugins[plugin.label] = plugin


@dataclass(slots=True)
class _Module:
    """A plugin module, imported at most once."""

    offers: dict[str, Plugin] = field(default_factory=dict)
    failure: BaseException | None = None


class Registry:
    """All installed plugins of this process. Nothing is imported until it is asked for."""

    def __init__(self, entries: Sequence[PluginEntry] | None = None) -> None:
        """Use the given entries, or discover the installed ones."""
        self._entries = tuple(discover() if entries is None else entries)
        self._modules: dict[tuple[str, str], _Module] = {}
        self._by_hand: dict[str, Plugin] = {}
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)

    def entries(self) -> tuple[PluginEntry, ...]:
        """Every entry point, sorted by kind and name; duplicates included."""
        return self._entries

    def names(self, kind: str) -> list[str]:
        """Installed names of a kind."""
        found = {entry.name for entry in self._entries if entry.kind == kind}
        found |= {plugin.name for plugin in self._by_hand.values() if plugin.kind == kind}
        return sorted(found)

    def add(self, module: ModuleType, *, distribution: str = "(python)") -> None:
        """Register a module by hand, as tests and scripts do; it wins over an installed name."""
        self._by_hand.update(
            self._collect(module, f"{distribution}:{module.__name__}", distribution)
        )

    def lease_policies(self, names: Iterable[str]) -> dict[str, LeasePolicy]:
        """Built lease policies by name, for a data store; raises as `get`."""
        plugins = {name: self.get("lease_policy", name) for name in names}
        return {
            name: plugin.factory(plugin.parse_options({}), PartContext(name=name, registry=self))
            for name, plugin in plugins.items()
        }

    def get(self, kind: str, name: str) -> Plugin:
        """The plugin; imports its module the first time.

        Raises:
            PluginNotFoundError: with the nearest names and the pip line.
            PluginConflictError: two distributions offer the name; both are named.
            PluginLoadError: the module failed; its distribution and the cause are named.
            PluginIncompatibleError: written for another API version.
        """
        label = f"{kind}.{name}"
        if label in self._by_hand:
            return self._by_hand[label]
        found = [entry for entry in self._entries if entry.label == label]
        if not found:
            raise PluginNotFoundError(self._not_found(kind, name))
        if len(found) > 1:
            offers = " and ".join(f"{e.distribution} ({e.module})" for e in found)
            raise PluginConflictError(
                f"{kind} plugin {name!r} is offered by {offers}; uninstall one of them, or name "
                f"the distributions to use in ASYNCFLOW_PLUGINS"
            )
        module = self._load(found[0])
        if isinstance(module.failure, PluginError):
            raise module.failure
        if module.failure is not None:
            raise PluginLoadError(
                f"{kind} plugin {name!r} of {found[0].distribution} {found[0].version} failed on "
                f"import of {found[0].module}: {type(module.failure).__name__}: {module.failure}"
            ) from module.failure
        if label not in module.offers:
            raise PluginLoadError(
                f"{found[0].distribution} declares the entry point {label!r}, but "
                f"{found[0].module} registers only {sorted(module.offers)}"
            )
        return module.offers[label]

    def _load(self, entry: PluginEntry) -> _Module:
        at = (entry.distribution, entry.module)
        if at not in self._modules:
            try:
                module = importlib.import_module(entry.module)
                offers = self._collect(
                    module, f"{entry.distribution}:{entry.module}", entry.distribution
                )
                self._modules[at] = _Module(offers)
            except (Exception, SystemExit) as failure:  # noqa: BLE001 - it may do anything
                self._modules[at] = _Module(failure=failure)
        return self._modules[at]

    def _collect(self, module: ModuleType, name: str, distribution: str) -> dict[str, Plugin]:
        registrar = Registrar(distribution)
        # pluggy refuses a module under two names and two under one; the latest registration counts.
        for known in {self._manager.get_plugin(name), self._manager.get_name(module) and module}:
            if known is not None:
                self._manager.unregister(known)
        others = set(self._manager.get_plugins())
        self._manager.register(module, name=name)
        try:
            self._manager.check_pending()
            caller = self._manager.subset_hook_caller("asyncflow_register", others)
            if not caller.get_hookimpls():
                raise PluginLoadError(
                    f"{module.__name__} of {distribution} implements no asyncflow_register; "
                    f"decorate one with asyncflow_core.hookimpl"
                )
            caller(registrar=registrar)
        except BaseException:
            self._manager.unregister(module)
            raise
        return registrar.plugins

    def _not_found(self, kind: str, name: str) -> str:
        if kind not in KINDS:
            return f"no plugin kind {kind!r}; kinds are {', '.join(KINDS)}"
        installed = self.names(kind)
        message = f"no {kind} plugin {name!r} (installed: {', '.join(installed) or 'none'})"
        known = [label.split(".")[1] for label in _KNOWN if label.startswith(f"{kind}.")]
        near = difflib.get_close_matches(name, {*installed, *known}, n=2)
        if near and name not in near:
            message += f"; did you mean {' or '.join(repr(n) for n in near)}?"
        for candidate in [name, *near]:
            if candidate not in installed and f"{kind}.{candidate}" in _KNOWN:
                return f"{message}; try: pip install {_KNOWN[f'{kind}.{candidate}']}"
        return message


def discover() -> list[PluginEntry]:
    """Entry points of the installed distributions, from metadata alone.

    Of a distribution seen twice on sys.path (an editable install and its source), importlib gives
    the first, which is the one that is imported. An entry point whose name is not `<kind>.<name>`
    is left out with a warning: a foreign mistake must not stop a run that does not use it.
    """
    allowed = os.environ.get("ASYNCFLOW_PLUGINS")
    names = None if allowed is None else {_CORE, *map(_normalised, allowed.split(","))} - {""}
    found = []
    for point in metadata.entry_points(group=hookspecs.PROJECT):
        distribution = _normalised(point.dist.name) if point.dist else "(unknown)"
        if names is not None and distribution not in names:
            continue
        kind, _, name = point.name.partition(".")
        if not (kind and name):
            _logger.warning(
                "entry point %r of %s is not called <kind>.<name>; it is left out",
                point.name,
                distribution,
            )
            continue
        entry = PluginEntry(
            kind, name, point.value, distribution, point.dist.version if point.dist else ""
        )
        found.append(entry)
    idle = sorted((names or set()) - {entry.distribution for entry in found} - {_CORE})
    if idle:
        _logger.warning(
            "ASYNCFLOW_PLUGINS names %s, of which no plugin is installed; it takes names of "
            "distributions (`pip list`), separated by commas",
            ", ".join(idle),
        )
    return sorted(found, key=lambda entry: (entry.kind, entry.name, entry.distribution))


def _is_model(options: Any) -> bool:
    return isinstance(options, type) and issubclass(options, BaseModel)


def _normalised(distribution: str) -> str:
    """A distribution's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", distribution.strip()).lower()
