"""The rollout's own directory: private, and swept by the next one if its owner was killed.

Blocking. The owner holds a lock on a file in it, which the kernel lets go when the owner ends, in
whatever way.
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
_PREFIX = "sglang-rollout-"
_NEW = "sglang-new-"
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
        made = Path(tempfile.mkdtemp(prefix=_NEW, dir=parent))
        self._lock = os.open(made / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Only now it has a name that others look at.
        self.path = made.rename(parent / made.name.replace(_NEW, _PREFIX))

    def remove(self) -> None:
        """Remove it and all in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _sweep(directory: Path) -> None:
    try:
        lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # being removed, or another user's
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
