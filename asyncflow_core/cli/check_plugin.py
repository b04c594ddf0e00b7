"""`asyncflow check-plugin KIND.NAME`: an installed plugin against the contract of its kind."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from asyncflow_core.cli.check_kit import (
    KITS,
    NOT_CHECKED,
    KitResult,
    missing_packages,
    missing_sizes,
    run_kit,
)
from asyncflow_core.cli.check_offer import Finding, Offer, examine_offer
from asyncflow_core.cli.check_parts import use_part
from asyncflow_core.cli.check_report import Clause, by_clause, facts, print_report
from asyncflow_core.config_source import ConfigSource
from asyncflow_core.errors import ConfigError, PluginNotFoundError
from asyncflow_core.parts import PartContext
from asyncflow_core.reference.tokenizer import CharactersOptions, CharactersTokenizer
from asyncflow_core.registry import KINDS, PluginEntry, Registry

__all__ = ["check_plugin"]

_INSTALL = "pip install 'asyncflow-core[testing]'"


def check_plugin(label: str, options: str | None, *, timeout_s: float, as_json: bool) -> int:
    """Check, print the report, return the exit status.

    0: all that is declared holds. 1: something does not. 2: it could not be checked, or not all.

    Raises:
        ConfigError: there is no such plugin, or the options cannot be read.
    """
    kind, dot, name = label.partition(".")
    if not (dot and name and kind in KINDS):
        raise ConfigError(
            f"{label!r} is not of the form KIND.NAME; kinds are {', '.join(KINDS)}, and "
            f"`asyncflow plugins` lists names"
        )
    given, registry = _read_options(options), Registry()
    entry = _entry(registry, kind, name)
    with (
        tempfile.TemporaryDirectory(prefix="af-check-") as run_dir,
        contextlib.redirect_stdout(sys.stderr),  # what a plugin prints is no part of the report
    ):
        context = _context(kind, registry, Path(run_dir), given)
        offer = examine_offer(registry, kind, name, given, context)
        used = use_part(offer, context) if offer.sound and kind not in KITS else []
    tests = _run_kit(offer, kind, name, timeout_s) if offer.sound and kind in KITS else []
    clauses = by_clause(tests)
    status = _status(offer.findings, used, clauses)
    offer.findings.extend(used)
    if as_json:
        found = facts(entry, offer.findings, clauses, tests)
        print(json.dumps({**found, "ok": status == 0}, indent=2))
    else:
        print_report(entry, offer.findings, clauses, tests)
    return status


def _read_options(options: str | None) -> dict[str, Any]:
    """From a file, or from YAML on the command line."""
    if options is None:
        return {}
    if os.path.isfile(options):
        return ConfigSource.from_file(options).tree
    try:
        found = YAML(typ="safe").load(options)
    except YAMLError as error:
        raise ConfigError(f"--options {options!r} is neither a file nor YAML: {error}") from error
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"--options {options!r} is neither a file nor a mapping; write it as "
            f"'{{name: value}}', or give a YAML file"
        )
    return dict(found)


def _entry(registry: Registry, kind: str, name: str) -> PluginEntry:
    for entry in registry.entries():
        if (entry.kind, entry.name) == (kind, name):
            return entry
    try:
        registry.get(kind, name)
    except PluginNotFoundError as error:  # with near names
        raise ConfigError(str(error)) from error
    raise AssertionError(f"{kind}.{name} without an entry point")


def _context(kind: str, registry: Registry, run_dir: Path, given: Mapping[str, Any]) -> PartContext:
    """As a run gives it; a model brings a tokenizer of its own."""
    tokenizer = CharactersTokenizer(CharactersOptions(), PartContext(name="tokenizer"))
    return PartContext(
        name=kind,
        run_dir=run_dir,
        tokenizer=None if "model" in given else tokenizer,
        registry=registry,
    )


def _run_kit(offer: Offer, kind: str, name: str, timeout_s: float) -> list[KitResult]:
    assert offer.options is not None
    why = ""
    if missing := missing_packages():
        why = f"it needs {' and '.join(missing)}; try: {_INSTALL}"
    elif missing := missing_sizes(kind, offer.options):
        why = f"it needs a store of its own size, and the options have no {', '.join(missing)}"
    if why:
        offer.findings.append(Finding("kit", NOT_CHECKED, why))
        return []
    plain = offer.options.model_dump(mode="json", exclude_unset=True)
    try:
        return run_kit(kind, name, plain, timeout_s=timeout_s, progress=_progress)
    finally:
        _progress(0, 0)


def _progress(done: int, tests: int) -> None:
    """A line that is written over; of those who look on alone."""
    if sys.stderr.isatty():
        text = f"{done} of {tests} tests" if tests else ""
        with contextlib.suppress(OSError):  # the terminal is gone
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _status(offered: Iterable[Finding], used: Iterable[Finding], clauses: Iterable[Clause]) -> int:
    """A contract is checked in full; of what has no kit, as much as can be."""
    asked = {finding.outcome for finding in offered} | {clause.outcome for clause in clauses}
    if "failed" in asked or any(each.outcome == "failed" for each in used):
        return 1
    return 2 if NOT_CHECKED in asked else 0
