"""Files that hold a version's bytes: one for each version, in a directory of the publisher's own.

    <root>/.lock             held while a publisher's directory is made or swept
    <root>/pub-XXXX/         one publisher's
        lock                 held as long as the publisher lives; once free, the directory is stale
        incoming             being written: no locator names it
        spare                retired: its pages are used again for the next version
        3-v17-l0.weights     published, or coming: serial, version, life

A file begins with how many of its buckets are there (`landed`), so that a version can be read while
it comes. A reader holds a shared lock on what it reads, which ends when the last view of the bytes
is gone, and not before: the publisher writes into a file again only where it gets the exclusive
lock. Nothing that is locked is ever shortened, or written but for buckets still to land, and all
bytes are reserved before they are written, so that a full disk is an error of `publish` and never a
SIGBUS in a reader. Locks end with their process, however it ends. Mappings are kept on both sides:
a first touch of a page costs more than copying it (measured: 1.0 GB/s into a new mapping, 4.8 GB/s
into a warm one).
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import shutil
import struct
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Mappings", "PublisherDirectory", "SegmentWriter", "landed", "publisher_gone", "sweep"]

ALIGNMENT = 64
"""Buckets start at multiples of this: a cache line, and any element size."""

_HEADER = ALIGNMENT
"""Bytes before the first bucket; an int64 counts the buckets that are there."""
_WHOLE = 1 << 62
_FAILED = -1


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
                gone = publisher_gone(directory)
            except PermissionError:
                continue  # another user's
            if gone:
                shutil.rmtree(directory, ignore_errors=True)
                removed.append(directory)
    return removed


def publisher_gone(directory: Path) -> bool:
    """Whether a publisher's directory is stale.

    Raises:
        OSError: it cannot be told, as without a free descriptor; taken for dead, a living
            publisher would lose its files.
    """
    try:
        fd = _open(directory / "lock", os.O_RDWR)
    except FileNotFoundError:
        return True  # the lock is made together with the directory, under the root's lock
    gone = _try_lock(fd, fcntl.LOCK_EX)
    os.close(fd)
    return gone


def landed(pages: NDArray[np.uint8]) -> int:
    """Buckets of a mapped file that are there, from the first on; negative if no more will come."""
    return int(pages[:8].view(np.int64)[0])


class SegmentWriter:
    """A file being filled. `finish` or `abort` ends it."""

    def __init__(self, path: Path, fd: int, pages: NDArray[np.uint8] | None = None) -> None:
        """Write to an open file that nobody else can see or has mapped.

        Args:
            path: of the file.
            fd: of the file; it is closed at the end.
            pages: the file as memory, where it was filled and mapped before.
        """
        self._path = path
        self._fd = fd
        self._pages = np.empty(0, np.uint8) if pages is None else pages
        self._reserved = os.fstat(fd).st_size
        self._end = _HEADER
        self._appeared = False

    def place(self, nbytes: int) -> tuple[int, NDArray[np.uint8] | None]:
        """Where the next bytes go, and the memory to put them in if there is some, else `write`.

        Raises:
            OSError: there is no room; nothing was written.
        """
        start = -(-self._end // ALIGNMENT) * ALIGNMENT
        self._end = start + nbytes
        self._reserve(self._end)
        warm = self._end <= len(self._pages)
        return start, self._pages[start : self._end] if warm else None

    def write(self, start: int, data: NDArray[np.uint8]) -> None:
        """Fill a place."""
        view: Any = data
        raw = memoryview(view).cast("B")
        written = 0
        while written < len(raw):
            written += os.pwrite(self._fd, raw[written:], start + written)

    def _reserve(self, end: int) -> None:
        if end > self._reserved:
            os.posix_fallocate(self._fd, self._reserved, end - self._reserved)
            self._reserved = end

    def appear(self, path: Path, nbytes: int) -> None:
        """Let the file be read under its name from now on, with so many bytes, none of them there.

        Raises:
            OSError: there is no room.
        """
        self._reserve(nbytes)
        os.ftruncate(self._fd, nbytes)
        self._reserved = nbytes
        self._count(0)
        fcntl.flock(self._fd, fcntl.LOCK_SH)
        self._path.rename(path)
        self._path, self._appeared = path, True

    def land(self, buckets: int) -> None:
        """Tell readers how many buckets are there."""
        if self._appeared:
            self._count(buckets)

    def give_up(self) -> None:
        """Tell readers that no more of what they wait for will come."""
        self.land(_FAILED)

    def _count(self, buckets: int) -> None:
        os.pwrite(self._fd, struct.pack("=q", buckets), 0)

    def finish(self, path: Path) -> int:
        """Let the file be there under its name, complete; returns its size."""
        self._reserve(self._end)
        if not self._appeared:
            os.ftruncate(self._fd, self._end)
            self._reserved = self._end
        self._count(_WHOLE)
        os.close(self._fd)
        self._fd = -1
        self._path.rename(path)
        return self._reserved

    def abort(self) -> None:
        """Leave nothing. Does nothing after `finish`."""
        if self._fd >= 0:
            self.give_up()
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
        self._pages: dict[int, NDArray[np.uint8]] = {}

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
                return SegmentWriter(incoming, fd, self._mapped(incoming))
            self._pages.pop(os.fstat(fd).st_ino, None)
            os.close(fd)
            spare.unlink()
        return SegmentWriter(incoming, _open(incoming, os.O_RDWR | os.O_CREAT | os.O_EXCL))

    def _mapped(self, path: Path) -> NDArray[np.uint8]:
        """A file of ours as memory; mapped once, since filling page tables takes as long as bytes.

        By a descriptor of its own: a lock ends with the last duplicate of what took it.
        """
        fd = _open(path, os.O_RDWR)
        try:
            state = os.fstat(fd)
            pages = self._pages.get(state.st_ino)
            if pages is None or len(pages) != state.st_size:
                mapping = mmap.mmap(fd, state.st_size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
                pages = self._pages[state.st_ino] = np.frombuffer(mapping, np.uint8)
            return pages
        finally:
            os.close(fd)

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
            self._pages.pop(path.stat().st_ino, None)
            return path.rename(path.with_suffix(".retired"))
        path.rename(spare)
        return None

    def close(self, remove: bool = True) -> None:
        """Remove everything, or leave it to the next sweep.

        What is still mapped stays readable until it is let go.
        """
        self._pages.clear()
        if remove:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


@dataclass(frozen=True, slots=True)
class _Mapping:
    """A file as memory, read-only, with a descriptor that tells whether the file is still there."""

    memory: mmap.mmap
    fd: int


class Mappings:
    """A reader's mappings, kept from version to version since publishers use files in turn."""

    def __init__(self) -> None:
        """Start with none."""
        self._known: dict[tuple[int, int], _Mapping] = {}

    def view(self, path: Path, nbytes: int) -> NDArray[np.uint8]:
        """The bytes of a published file, read-only; valid as long as the array or a view of it.

        Raises:
            FileNotFoundError: it was retired, or cannot be seen from here.
            ValueError: it has another size than it was published with.
        """
        self._forget_removed()
        lock = _open(path, os.O_RDONLY)
        try:
            # Between the opening and the lock the file may have been retired and taken for another
            # version: then its name is gone. From the lock on, it cannot be.
            if not _try_lock(lock, fcntl.LOCK_SH) or not _still_named(path, lock):
                raise FileNotFoundError(f"{path} was retired")
            state = os.fstat(lock)
            if state.st_size != nbytes:
                raise ValueError(
                    f"{path} has {state.st_size} bytes, it was published with {nbytes}"
                )
            memory = self._mapped(path, (state.st_dev, state.st_ino), nbytes)
        except BaseException:
            os.close(lock)
            raise
        array = np.frombuffer(memory, np.uint8)
        # numpy makes this array the base of every view of it, so the lock ends with the last one.
        weakref.finalize(array, os.close, lock)
        return array

    def knows(self, path: Path) -> bool:
        """Whether a file is mapped already, so that `view` takes no time."""
        try:
            state = path.stat()
        except OSError:
            return False
        return (state.st_dev, state.st_ino) in self._known

    def _mapped(self, path: Path, inode: tuple[int, int], nbytes: int) -> mmap.mmap:
        known = self._known.get(inode)
        if known is not None and len(known.memory) == nbytes:
            return known.memory
        self._forget(inode)
        fd = _open(path, os.O_RDONLY)
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        memory = mmap.mmap(fd, nbytes, flags=flags, prot=mmap.PROT_READ)
        self._known[inode] = _Mapping(memory, fd)
        return memory

    def _forget_removed(self) -> None:
        for inode, known in list(self._known.items()):
            if os.fstat(known.fd).st_nlink == 0:
                self._forget(inode)

    def _forget(self, inode: tuple[int, int]) -> None:
        known = self._known.pop(inode, None)
        if known is not None:
            os.close(known.fd)

    def close(self) -> None:
        """Forget all; what is still referenced stays readable."""
        for inode in list(self._known):
            self._forget(inode)


def _still_named(path: Path, fd: int) -> bool:
    try:
        named = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(fd))
