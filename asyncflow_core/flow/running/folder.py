"""The folder of a run, `runs/<name>/`: locked, and its files written whole."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

from asyncflow_core.config import RunConfig
from asyncflow_core.config_source import dump_yaml
from asyncflow_core.errors import ConfigError, ServiceError
from asyncflow_core.flow.running.resume import NOTES, Start, begin_again, first_life

__all__ = ["RunFolder"]


class RunFolder:
    """`runs/<name>/`: created fresh; what an earlier run of the name left is moved aside.

    Attributes:
        path: of the folder.
        start: where this life of the run begins.
    """

    def __init__(self, config: RunConfig, *, resume: bool = False) -> None:
        """Create the folder and write `config.yaml` and `environment.json`.

        Args:
            config: of the run.
            resume: go on with what is there.

        Raises:
            ConfigError: the folder cannot be made, another run has it, or the run that it holds
                cannot be resumed.
        """
        self.path = (Path(config.out) / config.name).resolve()
        self.moved_to: Path | None = None
        self._files: dict[str, TextIO] = {}
        self._lock = -1
        try:
            self._make(resume=resume)
            self.start = begin_again(self.path, config) if resume else Start(first_life(self.path))
            self._write("config.yaml", dump_yaml(config.model_dump(mode="json")))
            self._write_json("environment.json", _environment())
        except ConfigError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise ConfigError(
                f"out: the run's folder {str(self.path)!r} cannot be made: {error.strerror}"
            ) from error

    def _make(self, *, resume: bool) -> None:
        """Make and lock it, while no other run of `out` does.

        Raises:
            ConfigError: a run that is going on has it.
        """
        with contextlib.suppress(FileExistsError):  # a file: the folder below says it better
            self.path.parent.mkdir(parents=True, exist_ok=True)
        others = _locked(self.path.parent, wait=True)
        try:
            found = _locked(self.path)
            if found is None:
                then = "wait for its end" if resume else "give this one another name"
                raise ConfigError(f"name: a run is going on in {str(self.path)!r}; {then}")
            os.close(found)
            if not resume:
                self.moved_to = _move_aside(self.path)
            (self.path / "logs").mkdir(parents=True, exist_ok=resume)
            lock = _locked(self.path)
            self._lock = -1 if lock is None else lock
        finally:
            if others is not None:
                os.close(others)

    def log_path(self, service: str) -> str:
        """Where a service's output goes."""
        return str(self.path / "logs" / f"{service}.log")

    def append(
        self, name: str, records: Sequence[Mapping[str, Any]], *, sync: bool = False
    ) -> None:
        """Add lines of JSON to a file; with `sync` they are on the disk when it returns.

        Raises:
            ServiceError: it cannot be written.
        """
        with self._writing(name):
            if name not in self._files:
                self._files[name] = open(self.path / name, "a", encoding="utf-8")  # noqa: SIM115
            self._files[name].write("".join(f"{_json(record)}\n" for record in records))
            self._files[name].flush()
            if sync:
                os.fsync(self._files[name].fileno())

    def note(self, record: Mapping[str, Any]) -> None:
        """Write down a record of `Assigned`; it is on the disk when this returns."""
        self.append(NOTES, [record], sync=True)

    def sync(self) -> None:
        """What was appended so far is on the disk when this returns."""
        for name, file in list(self._files.items()):
            with self._writing(name):
                os.fsync(file.fileno())

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write one JSON file, whole or not at all.

        Raises:
            ServiceError: it cannot be written.
        """
        with self._writing(name):
            self._write_json(name, value)

    def _write_json(self, name: str, value: Mapping[str, Any]) -> None:
        self._write(name, json.dumps(value, indent=2) + "\n")

    def _write(self, name: str, text: str) -> None:
        temporary = self.path / f".{name}.tmp"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(self.path / name)

    def close(self) -> None:
        """Close what `append` opened; another run may then take the name."""
        for file in list(self._files.values()):
            with contextlib.suppress(OSError):  # lines of an `append` that failed
                file.close()
        self._files.clear()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ServiceError(
                f"{str(self.path / name)!r} cannot be written: {error.strerror}; make room there",
                service="recorder",
            ) from error


def _json(record: Mapping[str, Any]) -> str:
    """One line; a number that is not finite, which JSON does not have, is null."""
    try:
        return json.dumps(record, allow_nan=False)
    except ValueError:
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        return json.dumps(finite)


def _locked(path: Path, *, wait: bool = False) -> int | None:
    """A descriptor that holds the lock on `path`; None if another process has it.

    A path that is not there, or on a file system without locks, is not locked by anybody.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:
        pass
    return fd


def _move_aside(path: Path) -> Path | None:
    if not path.exists():
        return None
    number = 1
    while (aside := path.with_name(f"{path.name}-{number}")).exists():
        number += 1
    path.rename(aside)
    return aside


def _environment() -> dict[str, Any]:
    packages = {dist.name: dist.version for dist in metadata.distributions()}
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": dict(sorted(packages.items())),
    }
