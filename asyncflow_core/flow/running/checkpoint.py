"""Checkpoints of a run: one directory each, whole or not there.

    runs/NAME/checkpoints/40/record.json    version, life, prompts, counters, configuration, files
    runs/NAME/checkpoints/40/trainer/       what the trainer wrote

A checkpoint is written under another name and renamed at the end, so one that a death cut short is
never used. The record names every file with its size and checksum, so a damaged one is noticed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from asyncflow_core.errors import ConfigError, ServiceError

__all__ = ["Checkpoint", "Checkpoints"]

_FORMAT = 1
_RECORD = "record.json"
_TRAINER = "trainer"
_BLOCK = 1 << 22


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a run needs to go on, beside the trainer's own files.

    Attributes:
        version: completed steps.
        life: of the run that wrote it.
        assigned: `Assigned.dump()`: prompts of untrained batches, and the place of the next one.
        notes: records of assignments that were written down by then.
        totals: counters, as `Totals`.
        config: the resolved configuration.
    """

    version: int
    life: int
    assigned: dict[str, Any]
    notes: int
    totals: dict[str, Any]
    config: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run. Every method blocks: call it on a thread."""

    def __init__(self, run: Path) -> None:
        """Of the run in this folder."""
        self.path = run / "checkpoints"

    def versions(self) -> list[int]:
        """Those that are whole, ascending."""
        if not self.path.is_dir():
            return []
        return sorted(int(found.name) for found in self.path.iterdir() if found.name.isdigit())

    def trainer(self, version: int) -> Path:
        """Where the trainer's files of a checkpoint lie."""
        return self.path / str(version) / _TRAINER

    def begin(self, version: int) -> Path:
        """Make room for a checkpoint; where the trainer is to write, a directory not yet there.

        Raises:
            ServiceError: it cannot be made.
        """
        part = self._part(version)
        shutil.rmtree(part, ignore_errors=True)
        try:
            part.mkdir(parents=True)
        except OSError as error:
            raise self._not_written(part, error) from error
        return part / _TRAINER

    def finish(self, checkpoint: Checkpoint) -> None:
        """The trainer wrote its files: from now on the checkpoint counts.

        Raises:
            ServiceError: it cannot be written, or the trainer wrote nothing.
        """
        part = self._part(checkpoint.version)
        if not any(_files(part / _TRAINER)):
            raise ServiceError(
                f"the trainer wrote no file into {str(part / _TRAINER)!r}, so step "
                f"{checkpoint.version} could never be resumed; mend its save(), or set "
                f"checkpoint.every=0",
                service="checkpoint",
            )
        try:
            files = {
                str(file.relative_to(part)): [file.stat().st_size, _checksum(file)]
                for file in _files(part)
            }
            body = json.loads(json.dumps({"format": _FORMAT, **asdict(checkpoint), "files": files}))
            (part / _RECORD).write_text(json.dumps({**body, "checksum": _digest(body)}))
            _sync_tree(part)
            part.rename(self.path / str(checkpoint.version))
            _sync(self.path)
        except OSError as error:
            raise self._not_written(part, error) from error

    def prune(self, keep: int) -> None:
        """Delete all but the newest, and what deaths left half written or half deleted."""
        for version in self.versions()[:-keep]:
            (self.path / str(version)).rename(self.path / f".old-{version}")
        if self.path.is_dir():
            for left in self.path.iterdir():
                if left.name.startswith("."):
                    shutil.rmtree(left, ignore_errors=True)

    def load(self, version: int) -> Checkpoint:
        """Read a checkpoint's record and compare every file with it.

        Raises:
            ConfigError: a file is damaged or missing; it is named.
        """
        path = self.path / str(version)
        record = self._record(path)
        for name, (size, checksum) in record.pop("files").items():
            file = path / name
            try:
                found = file.stat().st_size, _checksum(file)
            except OSError as error:
                raise self._damaged(file, str(error.strerror)) from error
            if found != (size, checksum):
                raise self._damaged(file, f"{found[0]} bytes of another content, not the {size}")
        return Checkpoint(**record)

    def _record(self, path: Path) -> dict[str, Any]:
        file = path / _RECORD
        try:
            record = json.loads(file.read_bytes())
        except (OSError, ValueError) as error:
            raise self._damaged(file, str(error)) from error
        if not isinstance(record, dict) or record.get("format") != _FORMAT:
            raise self._damaged(file, f"its format is not {_FORMAT}")
        checksum = record.pop("checksum", None)
        if checksum != _digest(record):
            raise self._damaged(file, "its checksum is not that of its content")
        del record["format"]
        return record

    def _not_written(self, part: Path, error: OSError) -> ServiceError:
        return ServiceError(
            f"the checkpoint {str(part)!r} cannot be written: {error.strerror}; make room there",
            service="checkpoint",
        )

    def _damaged(self, file: Path, how: str) -> ConfigError:
        version = int(file.relative_to(self.path).parts[0])
        older = [found for found in self.versions() if found < version]
        if older:
            then = f"delete {str(self.path / str(version))!r} to resume from step {older[-1]}"
        else:
            then = "start the run anew: it is the only checkpoint"
        return ConfigError(
            f"resume: the file {str(file)!r} of the checkpoint is damaged ({how}); bring it back, "
            f"or {then}"
        )

    def _part(self, version: int) -> Path:
        return self.path / f".part-{version}"


def _files(path: Path) -> Iterator[Path]:
    return (found for found in sorted(path.rglob("*")) if found.is_file())


def _checksum(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb") as opened:
        while block := opened.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _digest(body: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())


def _sync_tree(path: Path) -> None:
    for found in (*path.rglob("*"), path):
        _sync(found)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
