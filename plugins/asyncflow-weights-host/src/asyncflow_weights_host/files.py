"""Files that hold a version's bytes: one for each version, in a directory of the publisher's own.

    <root>/.lock             held while a publisher's directory is made or swept
    <root>/pub-XXXX/         one publisher's
        lock                 held as long as the publisher lives; once free, the directory is stale
        incoming             being written: no locator names it
        spare                retired: its pages are used again for the next version
        3-v17-l0.weights     published: serial, version, life

A reader holds a shared lock on what it maps. The lock belongs to the mapping (`mmap` duplicates
the descriptor), so it ends when the last view of the bytes is gone, and not before: the publisher
writes into a file again only where it gets the exclusive lock. Nothing that is mapped is ever
shortened or written, and all bytes are reserved before they are written, so that a full disk is an
error of `publish` and never a SIGBUS in a reader. Locks end with their process, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["PublisherDirectory", "SegmentWriter", "map_segment", "sweep"]

ALIGNMENT = 64
"""Buckets start at multiples of this: a cache line, and any element size."""


def _open(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _root_lock(root: Path) -> Iterator[None]:
    fd = _open(root / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def sweep(root: Path) -> list[Path]:
    """Make the root if need be and remove the directories of dead publishers; returns them."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    removed = []
    with _root_lock(root):
        for directory in root.glob("pub-*"):
            try:
                fd = _open(directory / "lock", os.O_RDWR)
            except OSError:
                dead = True  # the lock is made together with the directory, under the root's lock
            else:
                dead = _try_lock(fd, fcntl.LOCK_EX)
                os.close(fd)
            if dead:
                shutil.rmtree(directory, ignore_errors=True)
                removed.append(directory)
    return removed


class SegmentWriter:
    """A file being filled. `finish` or `abort` ends it."""

    def __init__(self, path: Path, fd: int) -> None:
        """Write to an open file that nobody else can see or has mapped."""
        self._path = path
        self._fd = fd
        self._reserved = os.fstat(fd).st_size
        self._end = 0

    def append(self, data: memoryview) -> int:
        """Add bytes and return where they begin.

        Raises:
            OSError: there is no room; nothing was written.
        """
        start = -(-self._end // ALIGNMENT) * ALIGNMENT
        self._reserve(start + len(data))
        written = 0
        while written < len(data):
            written += os.pwrite(self._fd, data[written:], start + written)
        self._end = start + len(data)
        return start

    def _reserve(self, end: int) -> None:
        if end > self._reserved:
            os.posix_fallocate(self._fd, self._reserved, end - self._reserved)
            self._reserved = end

    def finish(self, path: Path) -> int:
        """Make the file appear under its name, complete; returns its size."""
        size = max(self._end, 1)  # an empty file cannot be mapped
        self._reserve(size)
        os.ftruncate(self._fd, size)
        os.close(self._fd)
        self._fd = -1
        self._path.rename(path)
        return size

    def abort(self) -> None:
        """Leave nothing. Does nothing after `finish`."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._path.unlink(missing_ok=True)


class PublisherDirectory:
    """The files of one publisher, who alone writes and removes them.

    Concurrency: one thread. No method takes long, but for `close`.
    """

    def __init__(self, root: Path) -> None:
        """Make the directory and hold its lock."""
        with _root_lock(root):
            self.path = Path(tempfile.mkdtemp(prefix="pub-", dir=root))  # mode 0700
            self._lock = _open(self.path / "lock", os.O_RDWR | os.O_CREAT)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._serial = 0

    def writer(self) -> SegmentWriter:
        """A file to be filled: the spare where there is one that nobody reads."""
        incoming, spare = self.path / "incoming", self.path / "spare"
        try:
            fd = _open(spare, os.O_RDWR)
        except FileNotFoundError:
            pass
        else:
            if _try_lock(fd, fcntl.LOCK_EX):
                spare.rename(incoming)
                return SegmentWriter(incoming, fd)
            os.close(fd)
            spare.unlink()
        return SegmentWriter(incoming, _open(incoming, os.O_RDWR | os.O_CREAT | os.O_EXCL))

    def name(self, version: int, life: int) -> Path:
        """A name that was never used."""
        self._serial += 1
        return self.path / f"{self._serial}-v{version}-l{life}.weights"

    def retire(self, path: Path) -> Path | None:
        """Take a published file away; its pages are kept for the next one unless some are.

        Returns:
            What is left to be unlinked: giving many pages back takes time, so not here.
        """
        spare = self.path / "spare"
        if spare.exists():
            return path.rename(path.with_suffix(".retired"))
        path.rename(spare)
        return None

    def close(self) -> None:
        """Remove everything. What is still mapped stays readable until it is let go."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def map_segment(path: Path, nbytes: int) -> NDArray[np.uint8]:
    """The bytes of a published file, read-only; they stay valid as long as the array or a view.

    Raises:
        FileNotFoundError: it was retired, or cannot be seen from here.
        ValueError: it has another size than it was published with.
    """
    fd = _open(path, os.O_RDONLY)
    try:
        # Between the opening and the lock the file may have been retired and taken for another
        # version: then its name is gone. From the lock on, it cannot be.
        if not _try_lock(fd, fcntl.LOCK_SH) or not _still_named(path, fd):
            raise FileNotFoundError(f"{path} was retired")
        size = os.fstat(fd).st_size
        if size != nbytes:
            raise ValueError(f"{path} has {size} bytes, it was published with {nbytes}")
        mapping = mmap.mmap(fd, size, access=mmap.ACCESS_READ)
    finally:
        os.close(fd)
    return np.frombuffer(mapping, np.uint8)


def _still_named(path: Path, fd: int) -> bool:
    try:
        named = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(fd))
