"""Ends what a dead run left behind: its processes, wherever they went, and its directory.

The local launcher starts this file as a small process of its own, without site packages and in a
session of its own. Standard input is the lifeline: a line for each process group that was started,
one with a minus for each that is gone, and its end when the run's own process is gone, in whatever
way. Unlike a child that watches its own lifeline, the guard also ends children that are stopped or
stuck in native code.

A process belongs to a run if its environment says so, or its process group was started for it. One
that leaves its group and hides its environment (setproctitle may overwrite it) is out of reach.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

__all__ = ["MARK", "SERVICE", "end_group", "end_marked", "main"]

MARK = "ASYNCFLOW_RUN"
"""Environment variable that holds the run's directory in every process started for it."""

SERVICE = "ASYNCFLOW_SERVICE"
"""Environment variable that holds the run's directory and the name of the service, with a slash
between, in its process and in whatever that one starts."""

_LIMIT_S = 2.0


def end_group(group: int) -> None:
    """SIGKILL a whole process group; nothing if it is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def end_marked(value: str, variable: str = MARK) -> None:
    """SIGKILL all processes that carry this mark, again until none is left (Linux only)."""
    deadline = time.monotonic() + _LIMIT_S
    while (found := _marked(f"{variable}={value}".encode())) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _marked(mark: bytes) -> list[int]:
    found = []
    for name in os.listdir("/proc") if Path("/proc/self/environ").exists() else ():
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    found.append(int(name))
    return found


def main(run_dir: str, lines: Iterable[str]) -> None:
    """Wait for the end of the run's process, then clean up."""
    groups = set()
    for line in lines:
        number = line.strip()
        if number.startswith("-"):  # it is gone: its number may be another's one day
            groups.discard(int(number[1:]))
        elif number.isdigit():
            groups.add(int(number))
    for group in groups:
        end_group(group)
    end_marked(run_dir)
    shutil.rmtree(run_dir, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.stdin)
