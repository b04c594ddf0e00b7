"""`asyncflow check-plugin KIND.NAME`: an installed plugin against the contract of its kind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from asyncflow_core.cli.check_kit import (
    KITS,
    NOT_CHECKED,
    NOT_DECLARED,
    KitResult,
    missing_packages,
    run_kit,
)
from asyncflow_core.cli.check_offer import Finding, Offer, examine_offer
from asyncflow_core.cli.check_parts import use_part
from asyncflow_core.config_source import ConfigSource
from asyncflow_core.errors import ConfigError, PluginNotFoundError
from asyncflow_core.parts import PartContext
from asyncflow_core.reference.tokenizer import CharactersOptions, CharactersTokenizer
from asyncflow_core.registry import KINDS, PluginEntry, Registry

__all__ = ["check_plugin"]

_INSTALL = "pip install 'asyncflow-core[testing]'"


@dataclass(frozen=True, slots=True)
class _Clause:
    """A clause of a contract, over all tests that cite it."""

    clause: str
    outcome: str
    reason: str


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
        tempfile.TemporaryDirectory(prefix="asyncflow-") as run_dir,
        contextlib.redirect_stdout(sys.stderr),  # what a plugin prints is no part of the report
    ):
        context = _context(kind, registry, Path(run_dir), given)
        offer = examine_offer(registry, kind, name, given, context)
        used = use_part(offer, context) if offer.sound and kind not in KITS else []
    tests = _run_kit(offer, kind, name, timeout_s) if offer.sound and kind in KITS else []
    clauses = _by_clause(tests)
    status = _status(offer.findings, used, clauses)
    offer.findings += used
    if as_json:
        print(json.dumps(_facts(entry, offer, clauses, tests, status), indent=2))
    else:
        _print_report(entry, offer, clauses, tests)
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
    if missing := missing_packages():
        text = f"{', '.join(missing)} is not installed, which runs the kit; try: {_INSTALL}"
        offer.findings.append(Finding("kit", NOT_CHECKED, text))
        return []
    assert offer.options is not None
    plain = offer.options.model_dump(mode="json", exclude_unset=True)
    try:
        return run_kit(kind, name, plain, timeout_s=timeout_s, progress=_progress)
    finally:
        _progress(0, 0)


def _progress(done: int, tests: int) -> None:
    """A line that is written over; of those who look on alone."""
    if sys.stderr.isatty():
        text = f"{done} of {tests} tests" if tests else ""
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _by_clause(tests: Iterable[KitResult]) -> list[_Clause]:
    """In the order of their numbers; a failure of one test is the clause's."""
    found: dict[str, list[KitResult]] = {}
    for test in tests:
        for clause in test.clauses:
            found.setdefault(clause, []).append(test)
    return [_clause(name, found[name]) for name in sorted(found, key=_number)]


def _number(clause: str) -> tuple[str, int]:
    letters, _, digits = clause.partition("-")
    return letters, int(digits)


def _clause(clause: str, tests: Sequence[KitResult]) -> _Clause:
    for outcome in ("failed", NOT_CHECKED, "passed", NOT_DECLARED):
        those = [test for test in tests if test.outcome == outcome]
        if outcome == "failed" and those:
            text = "; ".join(f"{test.test}: {_first_line(test.reason)}" for test in those)
            return _Clause(clause, outcome, text)
        if those:
            return _Clause(clause, outcome, "; ".join(dict.fromkeys(t.reason for t in those)))
    raise AssertionError(f"clause {clause} without a test")


def _first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0]


def _status(offered: Iterable[Finding], used: Iterable[Finding], clauses: Iterable[_Clause]) -> int:
    """A contract is checked in full; of what has no kit, as much as can be."""
    asked = {finding.outcome for finding in offered} | {clause.outcome for clause in clauses}
    if "failed" in asked or any(each.outcome == "failed" for each in used):
        return 1
    return 2 if NOT_CHECKED in asked else 0


def _facts(
    entry: PluginEntry,
    offer: Offer,
    clauses: Sequence[_Clause],
    tests: Sequence[KitResult],
    status: int,
) -> dict[str, Any]:
    return {
        "plugin": entry.label,
        "distribution": entry.distribution,
        "version": entry.version,
        "module": entry.module,
        "ok": status == 0,
        "offer": [asdict(finding) for finding in offer.findings],
        "clauses": [asdict(clause) for clause in clauses],
        "tests": [asdict(test) for test in tests],
    }


def _print_report(
    entry: PluginEntry, offer: Offer, clauses: Sequence[_Clause], tests: Sequence[KitResult]
) -> None:
    print(f"{entry.label} of {entry.distribution} {entry.version} ({entry.module})")
    for finding in offer.findings:
        print(_line(finding.what, finding.outcome, finding.text))
    if clauses:
        print(f"contract, clauses of docs/spec/{entry.kind}.md:")
    for clause in clauses:
        print(_line(clause.clause, clause.outcome, clause.reason))
    for test in tests:
        if test.outcome == "failed":
            print(f"\n{test.test} ({', '.join(test.clauses)}):\n{_indented(test)}")
    print(_summary(entry.kind, offer, clauses, tests))


def _line(what: str, outcome: str, text: str) -> str:
    return f"  {what:<15} {outcome:<13} {text}".rstrip()


def _indented(test: KitResult) -> str:
    text = test.details or test.reason
    return re.sub(r"^", "    ", text.strip(), flags=re.MULTILINE)


def _summary(
    kind: str, offer: Offer, clauses: Sequence[_Clause], tests: Sequence[KitResult]
) -> str:
    if not clauses:
        told = Counter(finding.outcome for finding in offer.findings)
        what = (
            ""
            if kind in KITS
            else f"; the kind {kind} has no conformance kit, these are all checks there are"
        )
        return f"{len(offer.findings)} checks: {_counts(told)}{what}"
    told = Counter(clause.outcome for clause in clauses)
    return f"{len(clauses)} clauses by {len(tests)} tests: {_counts(told)}"


def _counts(told: Mapping[str, int]) -> str:
    order = ("passed", "failed", NOT_DECLARED, NOT_CHECKED)
    return ", ".join(f"{told[outcome]} {outcome}" for outcome in order if told.get(outcome))
