"""Starts one server and ends it, with all it started, when whoever asked for it is gone.

A program of its own, run without site packages: `python keeper.py COMMAND...`. Standard input is
the lifeline: when it ends, in whatever way its other side ended, the server is told to end, and
soon after its process group is killed. Should this program be killed as well, the kernel kills the
server (PR_SET_PDEATHSIG), and SGLang's own processes end with theirs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1
_GRACE_S = 3.0


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(command: list[str]) -> int:
    """Run `command` in a session of its own until it ends or standard input does."""
    # The child's parent is a thread of this process; started here, it is the main one.
    server = subprocess.Popen(  # noqa: S603 - the command is ours
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=_die_with_parent,
    )

    def watch() -> None:
        while os.read(0, 1):
            pass
        server.terminate()  # it ends its children itself, in order
        time.sleep(_GRACE_S)
        _signal(server.pid, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    status = server.wait()
    _signal(server.pid, signal.SIGKILL)  # what it left behind
    return status if status >= 0 else 128 - status


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
