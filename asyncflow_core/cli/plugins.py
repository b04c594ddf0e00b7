"""`asyncflow plugins`: what is installed, from metadata alone unless `--load`."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from asyncflow_core.errors import AsyncFlowError
from asyncflow_core.registry import Plugin, PluginEntry, Registry

__all__ = ["show_plugins"]

_WIDTH = 1000


def show_plugins(*, load: bool) -> int:
    """Print a table; returns 1 if a plugin is in conflict or, with `load`, does not load."""
    registry = Registry()
    entries = registry.entries()
    offered = Counter(entry.label for entry in entries)
    table = Table("kind", "name", "version", "distribution", "state", box=None, pad_edge=False)
    details = []
    bad = 0
    for entry in entries:
        state, detail = _state(registry, entry, offered[entry.label], load=load)
        bad += state not in ("installed", "loaded")
        table.add_row(entry.kind, entry.name, entry.version, entry.distribution, state)
        details += [f"{entry.label}: {detail}"] if detail else []
    # As wide as it is: what is cut off cannot be read, and a pipe has no width.
    console = Console(width=_WIDTH, highlight=False)
    console.print(table)
    for detail in details:
        console.print(f"\n{detail}", markup=False, soft_wrap=True)
    return 1 if bad else 0


def _state(registry: Registry, entry: PluginEntry, offers: int, *, load: bool) -> tuple[str, str]:
    """A word for the table, and what there is to say below it."""
    if offers > 1:
        return "conflict: offered twice", ""
    if not load:
        return "installed", ""
    try:
        plugin = registry.get(entry.kind, entry.name)
    except AsyncFlowError as error:
        return "broken", str(error)
    return "loaded", _capabilities(plugin)


def _capabilities(plugin: Plugin) -> str:
    record: Any = plugin.capabilities
    parts, when = [], ""
    if callable(record):
        when = "by default: "
        try:
            record = record(plugin.options.model_construct())
        except Exception:  # noqa: BLE001 - options that have no default may be asked for
            return "depend on the options"
    if not dataclasses.is_dataclass(record) or isinstance(record, type):
        return ""
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if isinstance(value, frozenset | tuple):
            value = "+".join(sorted(map(str, value)))
        parts.append(f"{field.name}={value}")
    return when + ", ".join(parts)
