"""The controller's journal: records appended to a file, each with its length and a checksum.

    journal-<number>     MAGIC, then records: length u32, crc32 u32, crc32 of these u32, msgpack

A record counts once it is whole. A death leaves at most an unfinished record at the end, which was
never answered: it is cut off, and said. Anything else that does not fit its checksum is damage, and
refused by file and offset, since what follows may have been answered. The journal is made anew,
shorter, under the next number; the higher of two whole ones counts.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgpack

from asyncflow_core.errors import DataError

__all__ = ["Journal"]

_log = logging.getLogger(__name__)
_MAGIC = b"AFSTORE3"
_HEAD = struct.Struct("<III")


class Journal:
    """One store's journal. `append` writes to the file; `sync` waits for the disk.

    Attributes:
        nbytes: size of the file.
    """

    def __init__(self, directory: Path) -> None:
        """Find the newest journal, or begin one."""
        self._directory = directory
        self._offset = 0
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

    @property
    def place(self) -> str:
        """File and offset of the record that `read` gave last, as errors name it."""
        return f"{self._path} at byte {self._offset}"

    def read(self) -> Iterator[list[Any]]:
        """All whole records; an unfinished one at the end is cut off.

        Raises:
            DataError: the file is no journal, or is damaged.
        """
        with self._path.open("rb") as file:
            magic = file.read(len(_MAGIC))
            if len(magic) < len(_MAGIC) and _MAGIC.startswith(magic):
                os.pwrite(self._fd, _MAGIC, 0)  # a death left its first bytes half written
                self.nbytes = len(_MAGIC)
                return
            if magic != _MAGIC:
                raise DataError(
                    f"{self._path} begins with {magic!r}, not with {_MAGIC!r}: it is not the "
                    "journal of a data store, or of another version of it"
                )
            self._offset = file.tell()
            while record := self._next(file):
                yield record
                self._offset = file.tell()
        if self._offset < self.nbytes:
            _log.warning(
                "%s: %d bytes of an unfinished record are cut off; nobody was told that it counts",
                self.place,
                self.nbytes - self._offset,
            )
            os.ftruncate(self._fd, self._offset)
        self.nbytes = os.lseek(self._fd, 0, os.SEEK_END)

    def _next(self, file: BinaryIO) -> list[Any] | None:
        """The next record; None at the end, or where it is unfinished."""
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            return None
        length, checksum, own = _HEAD.unpack(head)
        if zlib.crc32(head[:8]) != own:
            if not any(head) and not any(file.read()):
                return None  # the file grew, and the machine died before it was written
            raise self._damaged("the head of a record")
        body = file.read(length)
        if len(body) < length:
            return None
        if zlib.crc32(body) != checksum:
            if not any(body) and not file.read(1):
                return None
            raise self._damaged("a record")
        try:
            record = msgpack.unpackb(body, use_list=True, strict_map_key=False)
        except (ValueError, msgpack.UnpackException) as error:
            raise self._damaged("a record") from error
        if type(record) is not list or not record or type(record[0]) is not str:
            raise self._damaged("a record")
        return record

    def _damaged(self, what: str) -> DataError:
        return DataError(
            f"{self.place}: {what} is damaged. Bring the file back from a copy; or give up what "
            f"was written from there on, {self.nbytes - self._offset} bytes, by: "
            f"truncate -s {self._offset} {self._path}"
        )

    def append(self, records: Iterable[list[Any]]) -> None:
        """Write records, one after another; all of them, or none if the disk is full."""
        data = b"".join(map(_pack, records))
        try:
            _write(self._fd, data)
        except OSError:
            os.ftruncate(self._fd, self.nbytes)  # what follows half a record could not be read
            os.lseek(self._fd, self.nbytes, os.SEEK_SET)
            raise
        self.nbytes += len(data)

    def sync(self) -> None:
        """Wait until everything appended is on the disk."""
        os.fdatasync(self._fd)

    def rewrite(self, records: Iterable[list[Any]]) -> None:
        """Begin anew with these; the old journal counts until the new one is whole."""
        path = self._directory / f"journal-{_number(self._path) + 1}"
        new = path.with_suffix(".new")
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _write(fd, _MAGIC)
            for record in records:
                _write(fd, _pack(record))
            os.fsync(fd)
        except OSError:
            os.close(fd)
            new.unlink()
            raise
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
    head = struct.pack("<II", len(body), zlib.crc32(body))
    return head + struct.pack("<I", zlib.crc32(head)) + body


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
