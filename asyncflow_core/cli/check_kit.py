"""Runs a conformance kit on an installed plugin, by pytest in a process of its own.

There a plugin may do anything: hang, end the process, leave processes behind. This side reads what
is reported (`asyncflow_core.testing._reports`), knows which test ran last, and ends all of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from asyncflow_core.errors import ServiceError
from asyncflow_core.flow.processes.guard import MARK, end_group, end_marked
from asyncflow_core.flow.processes.run_dir import RunDirectory

__all__ = [
    "KITS",
    "NOT_CHECKED",
    "NOT_DECLARED",
    "KitResult",
    "missing_packages",
    "missing_sizes",
    "run_kit",
]

KITS = {
    "data_store": "TestDataStore",
    "rollout": "TestRollout",
    "trainer": "TestTrainer",
    "weight_sync": "TestWeightSync",
}
"""Kinds that have a kit, and its class in `asyncflow_core.testing._installed`."""

NOT_DECLARED, NOT_CHECKED = "not declared", "not checked"
"""Outcomes beside "passed" and "failed"."""

_SIZES = ("capacity_rows", "capacity_bytes", "max_staleness")
_NEEDED = ("pytest", "pytest_asyncio")
_SETTINGS = "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n"
_LAST_LINES = 12
_START_S = 120.0  # of pytest, until it has found the tests


@dataclass(frozen=True, slots=True)
class KitResult:
    """How one test of a kit went.

    Attributes:
        test: its name, with its parameters.
        clauses: that it cites.
        outcome: "passed", "failed", "not declared" or "not checked".
        reason: in few words; empty for one that passed.
        details: what pytest shows of a failure.
    """

    test: str
    clauses: tuple[str, ...]
    outcome: str
    reason: str = ""
    details: str = ""


def missing_packages() -> list[str]:
    """What running a kit takes and is not installed, by the names that pip knows."""
    return [name.replace("_", "-") for name in _NEEDED if find_spec(name) is None]


def missing_sizes(kind: str, options: BaseModel) -> list[str]:
    """Options of a data store by which the kit makes it as small as it needs it."""
    needed = _SIZES if kind == "data_store" else ()
    return [name for name in needed if name not in type(options).model_fields]


def run_kit(
    kind: str,
    name: str,
    options: Mapping[str, Any],
    *,
    timeout_s: float,
    progress: Callable[[int, int], None],
) -> list[KitResult]:
    """Run the kit of a service's kind.

    Args:
        kind: one of `KITS`.
        name: of the installed plugin.
        options: of the plugin, as plain values.
        timeout_s: longest one test may take; then everything is ended.
        progress: is told how many tests have ended, of how many.

    Returns:
        A result for each test of the kit; those that were not reached are "not checked".

    Raises:
        ServiceError: pytest could not run any test; with its last lines.
    """
    ours, theirs = socket.socketpair()
    private, run = RunDirectory(), _Run(progress)
    asked = {"kind": kind, "name": name, "options": dict(options), "run_dir": str(private.path)}
    try:
        with (
            tempfile.TemporaryDirectory(prefix="af-check-", ignore_cleanup_errors=True) as scratch,
            ours,
        ):
            log = Path(scratch, "log")
            with theirs, log.open("wb") as output:
                report_to = {"scratch": scratch, "socket": theirs.fileno()}
                process = _start(KITS[kind], {**asked, **report_to}, Path(scratch), output)
            try:
                end = run.follow(ours, timeout_s)
            finally:
                _end(process, private)
            if run.tests is None:
                raise ServiceError(
                    f"the kit could not be run on {kind}.{name}: {end or _ended(process)}; last "
                    f"lines of pytest:\n{_tail(log)}"
                )
            return run.results(end or _ended(process))
    finally:
        private.remove()


def _start(
    kit: str, asked: Mapping[str, Any], scratch: Path, output: Any
) -> subprocess.Popen[bytes]:
    settings = scratch / "pytest.ini"
    settings.write_text(_SETTINGS)
    own = {"PYTEST_ADDOPTS", "PYTEST_PLUGINS"}  # of somebody's own tests
    environment = {name: value for name, value in os.environ.items() if name not in own}
    return subprocess.Popen(  # noqa: S603 - this interpreter
        [
            *(sys.executable, "-m", "pytest", f"{_kits_file()}::{kit}"),
            *("-c", str(settings), "--rootdir", str(scratch), "--basetemp", str(scratch / "tmp")),
            *("--noconftest", "--import-mode=importlib", "--tb=short", "-q"),
            *("-p", "no:cacheprovider", "-p", "pytest_asyncio.plugin"),
            *("-p", "asyncflow_core.testing._reports"),
        ],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        pass_fds=[asked["socket"]],
        env={
            **environment,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "ASYNCFLOW_CHECK": json.dumps(asked),
            MARK: asked["run_dir"],
        },
    )


def _kits_file() -> Path:
    """Found, not imported: the kits need pytest, and this module must not."""
    package = find_spec("asyncflow_core.testing")
    assert package is not None
    assert package.submodule_search_locations is not None
    return Path(package.submodule_search_locations[0], "_installed.py")


def _end(process: subprocess.Popen[bytes], private: RunDirectory) -> None:
    """End it and whatever it started, also in sessions of their own."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(0.5)  # it has reported its last test
    end_group(process.pid)
    process.wait()
    end_marked(str(private.path))


def _ended(process: subprocess.Popen[bytes]) -> str:
    status = process.returncode
    if status < 0:
        return f"the process was killed by signal {-status} ({signal.Signals(-status).name})"
    return f"the process ended with status {status}"


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(f"    {line}" for line in lines[-_LAST_LINES:])


class _Run:
    """What is known of one run of a kit; `tests` is None until they are collected."""

    def __init__(self, progress: Callable[[int, int], None]) -> None:
        self.tests: dict[str, tuple[str, ...]] | None = None
        self._progress = progress
        self._running = ""
        self._results: dict[str, KitResult] = {}

    def follow(self, reports: socket.socket, timeout_s: float) -> str:
        """Read until the other side ends; says why it was given up, or nothing."""
        reports.settimeout(max(timeout_s, _START_S))
        try:
            for line in _lines(reports):
                self._take(json.loads(line))
                reports.settimeout(timeout_s)
        except TimeoutError:
            return f"it did not end within {reports.gettimeout():g} s"
        except ConnectionError as error:
            return f"the connection to it broke: {error}"
        return ""

    def _take(self, report: dict[str, Any]) -> None:
        event = report.pop("event")
        if event == "collected":
            self.tests = {test: tuple(clauses) for test, clauses in report["tests"].items()}
        elif event == "started":
            self._running = report["test"]
        elif report["test"] not in self._results or report["outcome"] == "failed":
            self._results[report["test"]] = self._result(**report)
            self._progress(len(self._results), len(self.tests or ()))

    def _result(self, test: str, outcome: str, reason: str, details: str) -> KitResult:
        if outcome == "skipped":
            prefix = f"{NOT_CHECKED}: "
            outcome = NOT_CHECKED if reason.startswith(prefix) else NOT_DECLARED
            reason = reason.removeprefix(prefix).removeprefix(f"{NOT_DECLARED}: ")
        return KitResult(test, (self.tests or {}).get(test, ()), outcome, reason, details)

    def results(self, end: str) -> list[KitResult]:
        """Of all tests, in their order."""
        found = []
        for test, clauses in (self.tests or {}).items():
            if test in self._results:
                found.append(self._results[test])
            elif test == self._running:
                found.append(KitResult(test, clauses, "failed", end))
            else:
                reason = f"{self._running} did not end properly"
                found.append(KitResult(test, clauses, NOT_CHECKED, reason))
        return found


def _lines(reports: socket.socket) -> Iterator[bytes]:
    rest = b""
    while chunk := reports.recv(1 << 16):
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole
