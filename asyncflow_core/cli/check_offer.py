"""What a plugin says of itself, held against what core asks of its kind. Nothing is opened."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from asyncflow_core.errors import AsyncFlowError, ConfigError, PluginError
from asyncflow_core.flow.building import build, described
from asyncflow_core.flow.planning.checks import CAPABILITIES
from asyncflow_core.flow.planning.stages import plugin_contract
from asyncflow_core.flow.processes.launch import Launcher
from asyncflow_core.parts import PartContext, Prompts, StageContract, Tokenizer
from asyncflow_core.registry import API_VERSIONS, NoOptions, Plugin, Registry
from asyncflow_core.services.data_store import LEASE_POLICIES, SupportsAttach, SupportsDurability
from asyncflow_core.services.rollout import (
    SamplingParams,
    SupportsPause,
    SupportsReadback,
    SwitchMode,
)
from asyncflow_core.services.trainer import SupportsModelExport
from asyncflow_core.services.weight_sync import SupportsOverlappedFetch

__all__ = ["ENGINES", "Finding", "Offer", "examine_offer"]

ENGINES = ("jax", "megatron", "ray", "sglang", "tensorflow", "torch", "transformers", "vllm")
"""Of which a plugin's module imports none; its factories do."""

_SOURCES = frozenset({"buckets", "path", "collective"})
_PLACES = frozenset({"process", "host", "network"})
_SAMPLING = frozenset(SamplingParams.__dataclass_fields__)
_PARTS = {"tokenizer": Tokenizer, "prompts": Prompts, "launcher": Launcher}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: in a word.
        outcome: "passed", "failed" or "not checked".
        text: what was found, or is wrong and what to do.
    """

    what: str
    outcome: str
    text: str = ""


@dataclass(slots=True)
class Offer:
    """A plugin as far as it could be examined.

    Attributes:
        findings: in order.
        plugin: what it registered; None if it did not.
        options: validated; None if what was given does not validate.
        able: its capability record.
        made: what its factory built.
    """

    findings: list[Finding] = field(default_factory=list)
    plugin: Plugin | None = None
    options: BaseModel | None = None
    able: Any = None
    made: Any = None

    @property
    def sound(self) -> bool:
        """Whether all of it could be checked and nothing is wrong."""
        return self.made is not None and all(f.outcome == "passed" for f in self.findings)


def examine_offer(
    registry: Registry, kind: str, name: str, given: Mapping[str, Any], context: PartContext
) -> Offer:
    """Look at everything that can be looked at; what builds on a fault is left out."""
    offer = Offer()
    add = offer.findings.append
    before = set(sys.modules)
    try:
        offer.plugin = registry.get(kind, name)
    except PluginError as error:
        add(Finding("module", "failed", str(error)))
        return offer
    engines = sorted({*ENGINES} & set(sys.modules) - before)
    version = f"imported, registers it for API version {API_VERSIONS[kind]}"
    fault = f"it imports {', '.join(engines)}; let the factory import it, so that a run without it"
    add(_finding("module", version, [f"{fault} need not load it"] if engines else []))
    add(_options_model(offer.plugin))
    add(_options(offer, given))
    if offer.options is not None:
        add(_capabilities(offer))
        if kind in ("stage", "prompts"):
            add(_contract(offer.plugin, offer.options))
        add(_factory(offer, context))
    return offer


def _finding(what: str, text: str, faults: list[str]) -> Finding:
    return Finding(what, "failed" if faults else "passed", "; ".join(faults) or text)


def _options_model(plugin: Plugin) -> Finding:
    """Unknown keys refused: else a typing error in a configuration has no effect."""
    model, faults = plugin.options, []
    if model.model_config.get("extra") != "forbid":
        faults.append(
            f"{model.__name__} takes keys it does not know; derive it from "
            f"asyncflow_core.config.Section, which refuses them"
        )
    bare = [name for name, known in model.model_fields.items() if not known.description]
    said = f"{model.__name__}: {', '.join(model.model_fields) or 'none'}"
    if bare:
        said += f" (without a docstring: {', '.join(bare)})"
    return _finding("options model", "none" if model is NoOptions else said, faults)


def _options(offer: Offer, given: Mapping[str, Any]) -> Finding:
    plugin = offer.plugin
    assert plugin is not None
    try:
        options = plugin.parse_options(given)
    except ConfigError as error:
        hint = "" if given else "; give what it needs by --options"
        return Finding("options", "not checked", "; ".join(error.faults) + hint)
    if (fault := _changed_on_the_way(plugin, options)) is not None:
        return Finding("options", "failed", fault)
    try:
        faults = [*(plugin.check(options) if plugin.check else ())]
    except Exception as error:  # noqa: BLE001 - a plugin's code may do anything
        return Finding("options", "failed", f"`check` failed: {described(error)}")
    if faults:
        return Finding("options", "not checked", "; ".join(faults))
    offer.options = options
    return Finding("options", "passed", ", ".join(f"{k}={v!r}" for k, v in given.items()))


def _changed_on_the_way(plugin: Plugin, options: BaseModel) -> str | None:
    """A process of a run is told its options as JSON."""
    try:
        text = json.dumps(options.model_dump(mode="json", exclude_unset=True), allow_nan=False)
        again = plugin.options.model_validate(json.loads(text))
    except Exception as error:  # noqa: BLE001 - validators and serializers are a plugin's code
        return f"they cannot be sent to a process as JSON: {described(error)}"
    if again != options:
        return f"sent to a process as JSON, {options!r} becomes {again!r}"
    return None


def _capabilities(offer: Offer) -> Finding:
    plugin = offer.plugin
    assert plugin is not None
    try:
        able = plugin.capabilities_for(offer.options)  # type: ignore[arg-type]
    except Exception as error:  # noqa: BLE001 - a plugin's code may do anything
        return Finding("capabilities", "failed", f"they cannot be told: {described(error)}")
    record = CAPABILITIES.get(plugin.kind)
    if record is None:
        return Finding("capabilities", "passed", f"none, as for every {plugin.kind}")
    if not isinstance(able, record):
        fault = f"registered with {able!r}; give a {record.__name__} or a function that makes one"
        return Finding("capabilities", "failed", fault)
    offer.able = able
    shown = ", ".join(
        f"{f.name}={_shown(getattr(able, f.name))}" for f in dataclasses.fields(record)
    )
    return _finding("capabilities", shown, list(_RECORDS[plugin.kind](able)))


def _shown(value: Any) -> str:
    if isinstance(value, frozenset | tuple):
        return "+".join(sorted(map(str, value))) or "none"
    return str(value)


def _subset(name: str, value: Any, allowed: frozenset[Any]) -> Iterator[str]:
    found = frozenset(value)
    if not found or not found <= allowed:
        yield (
            f"{name} is {sorted(map(str, found))}; it takes one or more of "
            f"{', '.join(sorted(map(str, allowed)))}"
        )


def _rollout(able: Any) -> Iterator[str]:
    yield from _subset("switch_modes", able.switch_modes, frozenset(SwitchMode))
    yield from _subset("weight_sources", able.weight_sources, _SOURCES)
    yield from _subset("sampling", able.sampling, _SAMPLING)
    if missing := sorted({"max_new_tokens", "temperature"} - able.sampling):
        yield f"sampling has no {', '.join(missing)}, which every rollout honours"


def _trainer(able: Any) -> Iterator[str]:
    yield from _subset("loss_arrays", {able.loss_arrays}, frozenset({"numpy", "torch"}))
    if able.max_world_size is not None and able.max_world_size < 1:
        yield f"max_world_size is {able.max_world_size}; it is 1 or more, or None"


def _weight_sync(able: Any) -> Iterator[str]:
    yield from _subset("localities", able.localities, _PLACES)
    yield from _subset("source", {able.source}, _SOURCES)
    if able.concurrent_versions < 1:
        yield f"concurrent_versions is {able.concurrent_versions}; it is 1 or more"


def _data_store(able: Any) -> Iterator[str]:
    if missing := sorted(LEASE_POLICIES - able.lease_policies):
        yield f"lease_policies has no {', '.join(missing)}, which every data store has"


def _loss(able: Any) -> Iterator[str]:
    yield from _subset("arrays", {able.arrays}, frozenset({"numpy", "torch"}))


def _launcher(able: Any) -> Iterator[str]:
    yield from _subset("locality", {able.locality}, _PLACES)


_RECORDS: Mapping[str, Callable[[Any], Iterator[str]]] = {
    "data_store": _data_store,
    "launcher": _launcher,
    "loss": _loss,
    "rollout": _rollout,
    "trainer": _trainer,
    "weight_sync": _weight_sync,
}


def _contract(plugin: Plugin, options: BaseModel) -> Finding:
    try:
        found = plugin_contract(plugin, options)
    except ConfigError as error:
        return Finding("contract", "failed", str(error))
    said = f"{', '.join(found.reads) or 'nothing'} -> {', '.join(found.writes) or 'nothing'}"
    return _finding("contract", said, list(_contract_faults(plugin.kind, found)))


def _contract_faults(kind: str, contract: StageContract) -> Iterator[str]:
    if kind == "stage" and not contract.writes:
        yield "it writes nothing, so nothing would wait for it"
    if both := sorted({*contract.reads} & {*contract.writes}):
        yield f"it reads and writes {', '.join(both)}; a column is written once"
    yield from _subset("partitions", contract.partitions, frozenset({"train", "eval"}))


def _factory(offer: Offer, context: PartContext) -> Finding:
    plugin = offer.plugin
    assert plugin is not None
    try:
        made = build(plugin, offer.options, context)
    except AsyncFlowError as error:
        return Finding("factory", "failed", str(error))
    kind = type(made).__name__
    part = _PARTS.get(plugin.kind)
    if part is not None and not isinstance(made, part):
        return Finding("factory", "failed", f"it makes {kind}, which is no {part.__name__}")
    if plugin.kind in ("stage", "loss") and not callable(made):
        return Finding("factory", "failed", f"it makes {kind}, which cannot be called")
    offer.made = made
    return _finding("factory", f"makes {kind}", list(_unsupported(plugin.kind, offer.able, made)))


_SUPPORTS: Mapping[tuple[str, str], type[Any]] = {
    ("data_store", "remote"): SupportsAttach,
    ("rollout", "pause"): SupportsPause,
    ("rollout", "readback"): SupportsReadback,
    ("trainer", "model_export"): SupportsModelExport,
    ("weight_sync", "overlapped_fetch"): SupportsOverlappedFetch,
}


def _unsupported(kind: str, able: Any, made: Any) -> Iterator[str]:
    """Declared abilities without their methods."""
    declared = [name for of, name in _SUPPORTS if of == kind and getattr(able, name, False)]
    needed = [(name, _SUPPORTS[kind, name]) for name in declared]
    if kind == "data_store" and able is not None and able.durability - {"none"}:
        needed.append(("durability", SupportsDurability))
    for name, protocol in needed:
        if not isinstance(made, protocol):
            yield f"it declares {name} and is no {protocol.__name__}; add its methods"
