"""What `asyncflow check-plugin` found, clause by clause, as text and as plain values."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from asyncflow_core.cli.check_kit import KITS, NOT_CHECKED, NOT_DECLARED, KitResult
from asyncflow_core.cli.check_offer import Finding
from asyncflow_core.registry import PluginEntry

__all__ = ["Clause", "by_clause", "facts", "print_report"]


@dataclass(frozen=True, slots=True)
class Clause:
    """A clause of a contract, over all tests that cite it.

    Attributes:
        clause: as docs/spec numbers it.
        outcome: as `KitResult.outcome`.
        reason: in few words; empty for one that holds.
    """

    clause: str
    outcome: str
    reason: str


def by_clause(tests: Iterable[KitResult]) -> list[Clause]:
    """In the order of their numbers; a test that fails fails each clause it cites."""
    found: dict[str, list[KitResult]] = {}
    for test in tests:
        for clause in test.clauses:
            found.setdefault(clause, []).append(test)
    return [_clause(name, found[name]) for name in sorted(found, key=_number)]


def _number(clause: str) -> tuple[str, int]:
    letters, _, digits = clause.partition("-")
    return letters, int(digits)


def _clause(clause: str, tests: Sequence[KitResult]) -> Clause:
    for outcome in ("failed", NOT_CHECKED, "passed", NOT_DECLARED):
        those = [test for test in tests if test.outcome == outcome]
        if those:
            reasons = {_first_line(test.reason): test.test for test in reversed(those)}
            if outcome == "failed":
                texts = [f"{test}: {reason}" for reason, test in reversed(reasons.items())]
            else:
                texts = list(reversed(reasons))
            return Clause(clause, outcome, "; ".join(filter(None, texts)))
    raise AssertionError(f"clause {clause} without a test")


def _first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0]


def facts(
    entry: PluginEntry,
    findings: Iterable[Finding],
    clauses: Iterable[Clause],
    tests: Iterable[KitResult],
) -> dict[str, Any]:
    """All of it, as plain values."""
    return {
        "plugin": entry.label,
        "distribution": entry.distribution,
        "version": entry.version,
        "module": entry.module,
        "offer": [asdict(finding) for finding in findings],
        "clauses": [asdict(clause) for clause in clauses],
        "tests": [asdict(test) for test in tests],
    }


def print_report(
    entry: PluginEntry,
    findings: Sequence[Finding],
    clauses: Sequence[Clause],
    tests: Sequence[KitResult],
) -> None:
    """A line a check and a clause; then what pytest shows of each failure, and the counts."""
    print(f"{entry.label} of {entry.distribution} {entry.version} ({entry.module})")
    for finding in findings:
        print(_line(finding.what, finding.outcome, finding.text))
    if clauses:
        print(f"contract, clauses of docs/spec/{entry.kind}.md:")
    for clause in clauses:
        print(_line(clause.clause, clause.outcome, clause.reason))
    _print_failures([test for test in tests if test.outcome == "failed"])
    print(_summary(entry.kind, findings, clauses, tests))


def _line(what: str, outcome: str, text: str) -> str:
    return f"  {what:<15} {outcome:<13} {text}".rstrip()


def _print_failures(failed: Iterable[KitResult]) -> None:
    """Tests that failed for one reason share a traceback: a store that does not open fails all."""
    alike: dict[str, list[KitResult]] = {}
    for test in failed:
        alike.setdefault(test.reason, []).append(test)
    for first, *more in alike.values():
        others = f" and {len(more)} more" if more else ""
        text = re.sub(r"^", "    ", (first.details or first.reason).strip(), flags=re.MULTILINE)
        print(f"\n{first.test}{others}, {', '.join(first.clauses)}:\n{text}")


def _summary(
    kind: str, findings: Sequence[Finding], clauses: Sequence[Clause], tests: Sequence[KitResult]
) -> str:
    if clauses:
        return f"{len(clauses)} clauses by {len(tests)} tests: {_counts(clauses)}"
    more = "" if kind in KITS else f"; the kind {kind} has no conformance kit, this is all there is"
    checks = "1 check" if len(findings) == 1 else f"{len(findings)} checks"
    return f"{checks}: {_counts(findings)}{more}"


def _counts(each: Iterable[Finding | Clause]) -> str:
    told: Mapping[str, int] = Counter(one.outcome for one in each)
    order = ("passed", "failed", NOT_DECLARED, NOT_CHECKED)
    return ", ".join(f"{told[outcome]} {outcome}" for outcome in order if told.get(outcome))
