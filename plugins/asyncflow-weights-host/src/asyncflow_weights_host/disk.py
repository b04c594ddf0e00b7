"""Versions as directories of safetensors files; they appear complete, and go when nobody reads.

<root>/pub-XXXX/         one publisher's, with its `lock` as in `files.py`
    incoming-3/          being written
    3-v17-l0/            serial, version, life
        model-00001.safetensors ...   tensors of a bucket or more; readable by any tool
        readers          who reads the version holds a shared lock on it
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from asyncflow_core.errors import DataError
from asyncflow_core.services.weight_sync import (
    Bucket,
    ManifestBuilder,
    TensorSpec,
    WeightManifest,
)

__all__ = [
    "READERS",
    "VersionWriter",
    "lock_for_reading",
    "read_file",
    "remove_unread",
    "safetensors_files",
    "write_file",
]

READERS = "readers"
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100 << 20


def write_file(path: Path, bucket: Bucket) -> None:
    """One safetensors file, with the names of tied tensors in its metadata; synced to the disk."""
    header: dict[str, Any] = {}
    tied = {name: spec.name for spec in bucket.specs for name in spec.aliases}
    if tied:
        header["__metadata__"] = tied
    at = 0
    for spec in bucket.specs:
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [at, at + spec.nbytes],
        }
        at += spec.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        os.posix_fallocate(file.fileno(), 0, _LENGTH.size + len(text) + at)
        file.write(_LENGTH.pack(len(text)) + text)
        for spec in bucket.specs:
            data: Any = bucket.tensor_bytes(spec)
            file.write(memoryview(data))
        file.flush()
        os.fsync(file.fileno())


def read_file(path: Path) -> Bucket:
    """The tensors of a file, mapped read-only.

    Raises:
        DataError: it is not a sound safetensors file.
    """
    data = np.memmap(path, np.uint8, mode="r")
    try:
        (length,) = _LENGTH.unpack(data[: _LENGTH.size].tobytes())
        if length > min(_MAX_HEADER_BYTES, len(data) - _LENGTH.size):
            raise ValueError(f"its header has {length} bytes")
        start = _LENGTH.size + length
        header = json.loads(data[_LENGTH.size : start].tobytes())
        tied = header.pop("__metadata__", {})
        specs = [
            TensorSpec(
                name,
                entry["dtype"],
                tuple(map(int, entry["shape"])),
                start + int(entry["data_offsets"][0]),
                tuple(alias for alias, of in tied.items() if of == name),
            )
            for name, entry in header.items()
        ]
    except (AttributeError, KeyError, TypeError, ValueError, struct.error) as error:
        raise DataError(f"{path} is not a safetensors file: {error}") from error
    return Bucket(tuple(specs), data)


def safetensors_files(directory: Path) -> list[Path]:
    """The files of a version, in order."""
    return sorted(directory.glob("*.safetensors"))


class VersionWriter:
    """A version being written. `finish` or `abort` ends it."""

    def __init__(self, root: Path, serial: int, version: int, life: int, shard_bytes: int) -> None:
        """Make the directory that nobody is told of."""
        self._final = root / f"{serial}-v{version}-l{life}"
        self._path = Path(tempfile.mkdtemp(prefix="incoming-", dir=root))
        self._builder = ManifestBuilder(version, life)
        self._shard_bytes = shard_bytes
        self._waiting: list[Bucket] = []
        self._waiting_bytes = 0
        self._files = 0

    def add(self, bucket: Bucket) -> None:
        """Take a bucket; a file is written once enough came together."""
        copy = np.empty(len(bucket.data), np.uint8)
        self._builder.add(bucket, into=copy)
        self._waiting.append(Bucket(bucket.specs, copy))
        self._waiting_bytes += len(copy)
        if self._waiting_bytes >= self._shard_bytes:
            self._write()

    def _write(self) -> None:
        if not self._waiting:
            return
        self._files += 1
        path = self._path / f"model-{self._files:05}.safetensors"
        write_file(path, _joined(self._waiting))
        self._waiting, self._waiting_bytes = [], 0

    def finish(self) -> tuple[WeightManifest, Path]:
        """Let the version appear under its name."""
        self._write()
        (self._path / READERS).touch(mode=0o600)
        _sync(self._path)
        self._path.rename(self._final)
        _sync(self._final.parent)
        return self._builder.build(), self._final

    def abort(self) -> None:
        """Leave nothing. Does nothing after `finish`."""
        shutil.rmtree(self._path, ignore_errors=True)


def _joined(buckets: Sequence[Bucket]) -> Bucket:
    if len(buckets) == 1:
        return buckets[0]
    specs, at = [], 0
    for bucket in buckets:
        specs += [replace(spec, offset=spec.offset + at) for spec in bucket.specs]
        at += len(bucket.data)
    return Bucket(tuple(specs), np.concatenate([bucket.data for bucket in buckets]))


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove_unread(directory: Path) -> bool:
    """Remove a version unless somebody reads it; whether it is gone.

    It is renamed first, under the lock that keeps readers out: nobody finds half of it.
    """
    try:
        fd = os.open(directory / READERS, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        shutil.rmtree(directory, ignore_errors=True)
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        gone = directory.with_name(f"removed-{directory.name}")
        directory.rename(gone)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    shutil.rmtree(gone, ignore_errors=True)
    return True


def lock_for_reading(directory: Path) -> int:
    """A descriptor that keeps a version from being removed until it is closed.

    Raises:
        FileNotFoundError: it is not there any more.
    """
    fd = os.open(directory / READERS, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if not directory.exists():
            raise FileNotFoundError(f"{directory} was retired")
    except BlockingIOError:
        os.close(fd)
        raise FileNotFoundError(f"{directory} is being removed") from None
    except BaseException:
        os.close(fd)
        raise
    return fd
