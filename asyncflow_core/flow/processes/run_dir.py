"""A run's private directory for sockets and shared memory, swept once its run is dead."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from asyncflow_core.flow.processes.guard import end_marked

__all__ = ["RunDirectory"]

_PREFIX = "asyncflow-"


class RunDirectory:
    """One run's directory, in shared memory where there is some.

    The run's process holds a lock on the directory itself. The kernel lets it go when that process
    ends, however it ends, so no process id has to be trusted: a free lock is a dead run.
    """

    def __init__(self, base: Path | None = None) -> None:
        """Sweep what dead runs left in `base`, then make the directory and lock it."""
        base = base or _shared_memory()
        for old in base.glob(f"{_PREFIX}*"):
            _sweep(old)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))  # mode 0700
        # A sweep that runs at this moment may come between the making and the lock.
        while (lock := _lock(self.path)) is None or not self.path.exists():
            if lock is not None:
                os.close(lock)
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        self._lock = lock

    def remove(self) -> None:
        """Delete it, then let the lock go. Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _shared_memory() -> Path:
    shm = Path("/dev/shm")  # noqa: S108 - a private 0700 directory is made inside it
    return shm if os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def _lock(directory: Path) -> int | None:
    """A descriptor that holds the lock; None if another has it, or there is no such directory."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def _sweep(directory: Path) -> None:
    lock = _lock(directory)
    if lock is None:
        return
    if os.fstat(lock).st_uid == os.getuid():
        end_marked(str(directory))
        shutil.rmtree(directory, ignore_errors=True)
    os.close(lock)
