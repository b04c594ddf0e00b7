"""The memory of a shard: one sparse file that the shard, the controller and same-host clients map.

Its first MiB is a table of generations, uint32 each: a counter for every MiB of the file, raised
whenever the memory that begins there is lent anew. A reader copies, then compares: memory that was
lent to another writer meanwhile shows itself, so readers need no lock and pin nothing.

Pages are reserved with `posix_fallocate` before they are written (a full file system is an error,
never a SIGBUS), and given back by punching holes, so that one living row keeps its own pages and
not the memory around it. All of a hole reads as zeros, also where it shares a page with others, and
no segment begins with a zero (see `layout.py`): so a reader that comes too late for memory that
was not lent again sees that too.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import secrets
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from asyncflow_core.errors import BackpressureError, ServiceError

__all__ = ["ARENA_BYTES", "UNIT", "Arena"]

UNIT = 1 << 20
ARENA_BYTES = 1 << 36
"""Address room of one shard; memory is taken as it is written."""
_PAGE = 4096
_SPARE_BYTES = 8 << 20
"""Who reads a hole of a file in memory (rows dropped under it) makes pages there; without room for
them it would get a SIGBUS."""
_TMPFS = 0x01021994
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE
_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_libc = ctypes.CDLL(None, use_errno=True)


class Arena:
    """A mapped arena file.

    Attributes:
        data: all of it, as bytes.
        generations: the table.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        """Map the file.

        Raises:
            ServiceError: there is none, or it cannot be mapped.
        """
        self.path = path
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        try:
            self._fd = os.open(path, flags, 0o600)
            if create and not os.fstat(self._fd).st_size:
                os.ftruncate(self._fd, ARENA_BYTES)
                os.posix_fallocate(self._fd, 0, UNIT)
                os.pwrite(self._fd, secrets.token_bytes(4), 0)
            self._map = mmap.mmap(self._fd, ARENA_BYTES)
            self._in_memory = _in_memory(self._fd)
        except (OSError, ValueError) as error:
            raise ServiceError(f"the memory of a shard cannot be mapped: {path}: {error}") from (
                error
            )
        self.data: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.generations: NDArray[np.uint32] = self.data[:UNIT].view(np.uint32)
        self._words: NDArray[np.int64] = self.data.view(np.int64)

    @property
    def identity(self) -> int:
        """Of this file and no other: what a file of the same name held is not in it."""
        return int(self.generations[0])  # unit 0 is never lent

    @property
    def top(self) -> int:
        """Units that were ever lent, the table's own counted too; outlives the controller."""
        return int(self.generations[-1])  # an arena has not so many units

    @top.setter
    def top(self, units: int) -> None:
        self.generations[-1] = np.uint32(units)

    def reserve(self, start: int, nbytes: int) -> None:
        """Give pages to a range.

        Raises:
            BackpressureError: the file system is full, but for what late readers may take.
        """
        try:
            if self._in_memory:
                room = os.fstatvfs(self._fd)
                if room.f_bavail * room.f_frsize < nbytes + _SPARE_BYTES:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.posix_fallocate(self._fd, start, nbytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise BackpressureError(
                f"no memory for {nbytes} bytes at {self.path}: {error.strerror}; lower the store's "
                f"capacity_bytes, or give the file system more room"
            ) from error

        # In the mapping too, at once: page by page, as they are first written, takes longer.
        first = start // _PAGE * _PAGE
        with contextlib.suppress(OSError):  # Linux before 5.14 cannot
            self._map.madvise(_POPULATE_WRITE, first, start + nbytes - first)

    def holds(self, start: int, slot: int, generation: int) -> bool:
        """Whether the segment at `start` is still there: for who has just copied it."""
        return self.generations.item(slot) == generation and self._words.item(start >> 3) != 0

    def punch(self, start: int, nbytes: int) -> None:
        """Make a range zeros, and give back its whole pages."""
        end = start + nbytes
        first = min(end, -(-start // _PAGE) * _PAGE)
        last = max(first, end // _PAGE * _PAGE)
        # First what pages keep, the beginnings of segments above all. Not through the mapping,
        # which would raise SIGBUS if a page were not there.
        for position, after in ((start, first), (last, end)):
            if after > position:
                os.pwrite(self._fd, bytes(after - position), position)
        if last > first and _libc.fallocate(
            self._fd, _PUNCH_HOLE, ctypes.c_long(first), ctypes.c_long(last - first)
        ):
            number = ctypes.get_errno()
            if number not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise OSError(number, os.strerror(number), str(self.path))
            for position in range(first, last, UNIT):  # a file system that keeps its pages
                os.pwrite(self._fd, bytes(min(UNIT, last - position)), position)

    def sync(self) -> None:
        """Wait until all bytes are on the disk."""
        os.fdatasync(self._fd)

    def allocated(self) -> int:
        """Bytes the file takes."""
        return os.fstat(self._fd).st_blocks * 512

    def close(self) -> None:
        """Unmap as soon as no view is left. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        del self.generations, self._words, self.data


def _in_memory(fd: int) -> bool:
    """Whether a file lies on tmpfs."""
    found = (ctypes.c_long * 32)()  # a struct statfs, which begins with its type
    return _libc.fstatfs(fd, found) == 0 and found[0] == _TMPFS
