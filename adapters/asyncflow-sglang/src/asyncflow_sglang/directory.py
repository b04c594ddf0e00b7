"""The rollout's own directory: private, and swept by the next one if its owner was killed.

Blocking. The owner holds a lock on a file in it, which the kernel lets go when the owner ends, however.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from pathlib import Path

__all__ = ["OwnDirectory", "default_parent"]

_log = logging.getLogger(__name__)
_PREFIX = "asyncflow-sglang-"
_LOCK = "owner"


def default_parent() -> Path:
    """In memory where that can be written, else the system's temporary folder."""
    memory = Path("/dev/shm")  # noqa: S108 - what is made in it has mode 0700
    return memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


class OwnDirectory:
    """A directory of mode 0700 in `parent`, locked until `remove`."""

    def __init__(self, parent: Path) -> None:
        """Sweep what the dead left there, and make it."""
        parent.mkdir(parents=True, exist_ok=True)
        for stale in parent.glob(f"{_PREFIX}*"):
            _sweep(stale)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Remove it and all in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _sweep(directory: Path) -> None:
    try:
        lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # being made or removed, or another user's
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    else:
        _log.warning("removed what a killed rollout left in %s", directory)
        shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(lock)
