"""Directories that appear whole or not at all, and the trainer's checkpoint in one.

A checkpoint holds `model.safetensors` (float32 weights by name), `optimizer.safetensors` (moments
by `<moment>.<name>`) and `state.msgpack` (counters). It names whole tensors, so that it does not
depend on how many ranks wrote it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgpack
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from asyncflow_core.errors import DataError, ServiceError

__all__ = ["new_directory", "read_checkpoint", "write_checkpoint"]

_FORMAT = 1
_WEIGHT = "weight."


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


def write_checkpoint(
    directory: Path, state: Mapping[str, torch.Tensor], counters: Mapping[str, int]
) -> None:
    """Write tensors as `Sharded.state` names them, and counters."""
    weights = {n.removeprefix(_WEIGHT): t for n, t in state.items() if n.startswith(_WEIGHT)}
    moments = {n: t for n, t in state.items() if not n.startswith(_WEIGHT)}
    save_file(weights, directory / "model.safetensors")
    save_file(moments, directory / "optimizer.safetensors")
    content: bytes = msgpack.packb({"format": _FORMAT, **counters})
    (directory / "state.msgpack").write_bytes(content)


def read_checkpoint(path: str) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """What `write_checkpoint` wrote.

    Raises:
        DataError: it is not there, not whole, or of another format.
    """
    directory = Path(path)
    try:
        counters: dict[str, int] = msgpack.unpackb((directory / "state.msgpack").read_bytes())
        found = counters.pop("format")
        if found != _FORMAT:
            raise DataError(f"checkpoint {path} has format {found}, this trainer reads {_FORMAT}")
        weights = load_file(directory / "model.safetensors")
        moments = load_file(directory / "optimizer.safetensors")
    except (OSError, KeyError, ValueError, AttributeError, SafetensorError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} is no checkpoint of this trainer: {error}") from error
    return {**{f"{_WEIGHT}{name}": t for name, t in weights.items()}, **moments}, counters
