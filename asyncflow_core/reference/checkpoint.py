"""Checkpoints of the tabular trainer: numpy files and a msgpack record, written atomically."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgpack
import numpy as np
from numpy.typing import NDArray

from asyncflow_core.errors import DataError, ServiceError

__all__ = ["read_checkpoint", "write_checkpoint"]

_FORMAT = 1
_RECORD = "record.msgpack"


def write_checkpoint(
    path: Path, arrays: Mapping[str, NDArray[np.float64]], record: Mapping[str, Any]
) -> None:
    """Write a new directory: all of it, or nothing under its name.

    Raises:
        ServiceError: the directory is there already.
    """
    if path.exists():
        raise ServiceError(f"{path} is there already; a checkpoint goes into a new directory")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part-{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        for name, array in arrays.items():
            with (part / f"{name}.npy").open("wb") as file:
                np.save(file, array, allow_pickle=False)
                _flush(file)
        with (part / _RECORD).open("wb") as file:
            file.write(msgpack.packb({"format": _FORMAT, **record}))
            _flush(file)
        _flush_directory(part)
        part.rename(path)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    _flush_directory(path.parent)


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _flush_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_checkpoint(
    path: Path, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, NDArray[np.float64]], dict[str, Any]]:
    """Arrays of these names and the record.

    Raises:
        DataError: a file is missing, damaged, or of another shape; it is named.
    """
    arrays = {}
    try:
        record = msgpack.unpackb((path / _RECORD).read_bytes())
        for name in shapes:
            arrays[name] = np.load(path / f"{name}.npy", allow_pickle=False)
    except (OSError, ValueError, msgpack.UnpackException) as error:
        raise DataError(f"{path} is not a checkpoint that can be read: {error}") from error
    if not isinstance(record, dict) or record.pop("format", None) != _FORMAT:
        raise DataError(f"{path / _RECORD} is not of checkpoint format {_FORMAT}")
    for name, shape in shapes.items():
        array = arrays[name]
        if array.shape != shape or array.dtype != np.float64:
            raise DataError(
                f"{path / f'{name}.npy'} is {array.dtype} {list(array.shape)}, "
                f"the model needs float64 {list(shape)}"
            )
    return arrays, record
