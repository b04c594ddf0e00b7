"""Directories that appear whole or not at all, and the trainer's checkpoint in one.

A checkpoint holds `model/` and `optimizer/`, in which each rank has a safetensors file with its
stretches of flattened tensors (float32 weights by name, moments by `<moment>.<name>`), and
`state.msgpack` with counters. Names are those of whole tensors, so that it does not depend on how
many ranks wrote it, nor how they shared the work.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack

from asyncflow_core.errors import DataError, ServiceError
from asyncflow_hzp.ranks import Ranks

__all__ = ["new_directory", "read_record", "shared_directory", "write_record"]

_FORMAT = 3
_RECORD = "state.msgpack"


@contextmanager
def new_directory(path: str) -> Iterator[Path]:
    """Fill a temporary neighbour of `path`; it takes the name when the block ends well.

    Raises:
        ServiceError: something is there already.
    """
    target = Path(path)
    if target.exists():
        raise ServiceError(f"{target} exists already; a checkpoint goes into a new directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        for file in (*partial.iterdir(), partial):
            _flush(file)
        partial.rename(target)
        _flush(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _flush(path: Path) -> None:
    """Make a file's bytes, or a directory's names, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def shared_directory(path: str, ranks: Ranks) -> Iterator[Path]:
    """As `new_directory`, filled by all ranks, which see one file system; one failure fails all.

    Raises:
        ServiceError: something is there already, or another rank failed.
    """
    target = Path(path)
    partial = target.with_name(f"{target.name}.partial")

    def begin() -> None:
        if target.exists():
            raise ServiceError(f"{target} exists already; a checkpoint goes into a new directory")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    def end() -> None:
        for file in (*partial.rglob("*"), partial):
            _flush(file)
        partial.rename(target)
        _flush(target.parent)

    ranks.lead(begin)
    failure: BaseException | None = None
    try:
        yield partial
    except Exception as error:  # noqa: BLE001 - the others must hear of it first
        failure = error
    try:
        ranks.agree(failure)
        ranks.lead(end)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def write_record(directory: Path, record: Mapping[str, Any]) -> None:
    """Write counters, and what else is no tensor."""
    content: bytes = msgpack.packb({"format": _FORMAT, **record})
    (directory / _RECORD).write_bytes(content)


def read_record(path: str) -> dict[str, Any]:
    """What `write_record` wrote.

    Raises:
        DataError: it is not there, or of another format.
    """
    try:
        record: dict[str, Any] = msgpack.unpackb((Path(path) / _RECORD).read_bytes())
        found = record.pop("format")
        complete = {"updates", "tokens", "kinds", "common"} <= set(record)
    except (OSError, KeyError, ValueError, AttributeError, TypeError) as error:
        raise DataError(f"{path} is no checkpoint of this trainer: {error}") from error
    if found != _FORMAT or not complete:
        raise DataError(f"checkpoint {path} has format {found}, this trainer reads {_FORMAT}")
    return record
