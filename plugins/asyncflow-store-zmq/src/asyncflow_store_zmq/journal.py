"""The controller's journal: records appended to a file, each with its length and a checksum.

    journal-<number>     MAGIC, then records: length u32, crc32 u32, msgpack

A record counts once it is whole; what a death left half written is cut off. The journal is made
anew, shorter, under the next number; the higher of two whole ones counts.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgpack

from asyncflow_core.errors import DataError

__all__ = ["Journal"]

_MAGIC = b"AFSTORE1"
_HEAD = struct.Struct("<II")


class Journal:
    """One store's journal. `append` writes to the file; `sync` waits for the disk.

    Attributes:
        nbytes: size of the file.
    """

    def __init__(self, directory: Path) -> None:
        """Find the newest journal, or begin one."""
        self._directory = directory
        for left in directory.glob("journal-*.new"):
            left.unlink()
        found = sorted(directory.glob("journal-*"), key=_number)
        for older in found[:-1]:
            older.unlink()
        self._path = found[-1] if found else directory / "journal-1"
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not os.fstat(self._fd).st_size:
            os.write(self._fd, _MAGIC)
        self.nbytes = os.lseek(self._fd, 0, os.SEEK_END)

    def read(self) -> Iterator[list[Any]]:
        """All whole records; a torn end is cut off.

        Raises:
            DataError: the file is no journal.
        """
        with self._path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise DataError(f"{self._path} is not the journal of a data store")
            good = file.tell()
            while record := _next(file):
                good = file.tell()
                yield record
        if good < self.nbytes:
            os.ftruncate(self._fd, good)
        self.nbytes = os.lseek(self._fd, 0, os.SEEK_END)

    def append(self, records: Iterable[list[Any]]) -> None:
        """Write records, one after another."""
        data = b"".join(map(_pack, records))
        self.nbytes += len(data)
        _write(self._fd, data)

    def sync(self) -> None:
        """Wait until everything appended is on the disk."""
        os.fdatasync(self._fd)

    def rewrite(self, records: Iterable[list[Any]]) -> None:
        """Begin anew with these; the old journal counts until the new one is whole."""
        path = self._directory / f"journal-{_number(self._path) + 1}"
        new = path.with_suffix(".new")
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        _write(fd, _MAGIC)
        for record in records:
            _write(fd, _pack(record))
        os.fsync(fd)
        new.rename(path)
        directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(directory)
        os.close(directory)
        os.close(self._fd)
        self._path.unlink()
        self._path, self._fd = path, fd
        self.nbytes = os.lseek(fd, 0, os.SEEK_END)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def _number(path: Path) -> int:
    return int(path.name.removeprefix("journal-").split(".")[0])


def _pack(record: list[Any]) -> bytes:
    body: bytes = msgpack.packb(record)
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


def _next(file: Any) -> list[Any] | None:
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    length, checksum = _HEAD.unpack(head)
    body = file.read(length)
    if len(body) < length or zlib.crc32(body) != checksum:
        return None
    record: list[Any] = msgpack.unpackb(body, use_list=True, strict_map_key=False)
    return record


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
