"""A pytest plugin that tells `asyncflow check-plugin` how each test of a kit went.

It is loaded by `-p asyncflow_core.testing._reports` in a process of its own, and writes a line of
JSON for each event to the socket that the environment variable `ASYNCFLOW_CHECK` names. When the
other side of the socket is gone, this process and all it has started end.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from asyncflow_core.flow.processes.guard import end_group, end_marked

VARIABLE = "ASYNCFLOW_CHECK"
"""JSON: `kind`, `name` and `options` of the plugin; `socket`, the descriptor to report to;
`run_dir` and `scratch`, folders that the other side removes, or this one when that is gone."""

_CLAUSE = re.compile(r"\b[A-Z]{2}-\d+\b")

_KITS = ("data_store", "rollout", "trainer", "weight_sync")


class _Reports:
    def __init__(self, asked: Mapping[str, Any]) -> None:
        self._run_dir, self._scratch = asked["run_dir"], asked["scratch"]
        self._socket = socket.socket(fileno=asked["socket"])
        self._socket.set_inheritable(False)
        threading.Thread(target=self._end_with_reader, daemon=True).start()

    def _end_with_reader(self) -> None:
        self._socket.recv(1)  # nothing is ever sent here: it returns when the other side is gone
        end_marked(self._run_dir)
        for folder in (self._run_dir, self._scratch):
            shutil.rmtree(folder, ignore_errors=True)
        end_group(os.getpid())

    def _tell(self, event: str, **facts: Any) -> None:
        self._socket.sendall(json.dumps({"event": event, **facts}).encode() + b"\n")

    def collected(self, items: Sequence[pytest.Item]) -> None:
        tests = {item.name: _clauses(item) for item in items}
        self._tell("collected", tests=tests)

    @pytest.hookimpl
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._tell("started", test=_name(nodeid))

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._tell(
                "ended",
                test=_name(report.nodeid),
                outcome=report.outcome,
                reason=_reason(report),
                details=report.longreprtext if report.failed else "",
            )


def pytest_configure(config: pytest.Config) -> None:
    """Start to report, and let the kits' assertions say what they found."""
    pytest.register_assert_rewrite(*(f"asyncflow_core.testing.{kit}" for kit in _KITS))
    reports = _Reports(json.loads(os.environ[VARIABLE]))
    config.pluginmanager.register(reports, "asyncflow-reports")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Tell which tests there are and which clauses each of them cites."""
    reports = session.config.pluginmanager.get_plugin("asyncflow-reports")
    assert isinstance(reports, _Reports)
    reports.collected(session.items)


def _clauses(item: pytest.Item) -> list[str]:
    function = getattr(item, "function", None)
    return list(dict.fromkeys(_CLAUSE.findall(function.__doc__ or ""))) if function else []


def _name(nodeid: str) -> str:
    return nodeid.split("::", 2)[-1]


def _reason(report: pytest.TestReport) -> str:
    found = report.longrepr
    if isinstance(found, tuple):  # of a skip: file, line, reason
        return found[2].removeprefix("Skipped: ")
    crash = getattr(found, "reprcrash", None)
    return str(crash.message if crash is not None else found or "")
