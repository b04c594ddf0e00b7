"""The directories of a store: one for sockets, one for memory and journal."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from asyncflow_core.errors import ConfigError
from asyncflow_core.flow.processes.run_dir import RunDirectory

__all__ = ["StoreDirectory", "clear_directory"]


class StoreDirectory:
    """What a store puts on file systems. Only the user's own directory outlives it.

    Attributes:
        sockets: where sockets lie.
        memory: where arenas and journal lie; locked, so that no two stores share it.
    """

    def __init__(self, run_dir: Path | None, directory: Path | None, *, durable: bool) -> None:
        """Use the run's directory or make one in memory; the user's `directory` for the memory.

        Raises:
            ConfigError: it cannot be used, another store uses it, or it holds what this one would
                delete; durable without a directory.
        """
        if durable and directory is None:
            raise ConfigError("a durable store needs its option 'directory', on a disk")
        self._own: RunDirectory | None = None
        if run_dir is None:
            self._own = RunDirectory()
            run_dir = self._own.path
        self.sockets = run_dir
        self.memory = directory or self.sockets / "store"
        try:
            self.memory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(self.memory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another data store uses the directory {self.memory}") from None
        except OSError as error:
            raise ConfigError(f"the directory {self.memory} is no use: {error}") from error
        if not durable:
            if any(self.memory.glob("journal-*")):
                self.close()
                raise ConfigError(
                    f"the directory {self.memory} holds the rows of a durable store, which one "
                    f"without durability would delete; give another directory, or durability "
                    f"'journal' or 'fsync', or delete its journal-* and *.arena files"
                )
            for arena in self.memory.glob("*.arena"):
                arena.unlink()

    @property
    def shards(self) -> int:
        """Shards whose memory is there already."""
        numbers = (int(path.stem.removeprefix("shard-")) for path in self.memory.glob("*.arena"))
        return max(numbers, default=-1) + 1

    def close(self) -> None:
        """Let go of it."""
        os.close(self._lock)
        if self._own is not None:
            self._own.remove()


def clear_directory(directory: Path) -> None:
    """Delete what an ended store left; the count of its lives stays, so that leases differ.

    Records go first: memory that no record names is nothing.
    """
    for pattern in ("journal-*", "*.arena"):
        for path in directory.glob(pattern):
            path.unlink()
