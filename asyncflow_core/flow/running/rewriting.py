"""Cutting the files of lines that a run wrote: all of them, or none."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncflow_core.errors import ConfigError

__all__ = ["DAMAGED", "Rewriting", "record_of", "whole_lines"]

DAMAGED = (LookupError, TypeError, ValueError, AttributeError)
"""What reading a line that holds something else may raise."""


class Rewriting:
    """Files written anew beside the old ones, which they replace when all of them are there."""

    def __init__(self) -> None:
        """Nothing written."""
        self._files: list[tuple[Path, Path]] = []

    def cut(self, path: Path, keep: Callable[[Mapping[str, Any]], bool]) -> None:
        """Keep some of the lines of a file, if it is there.

        Raises:
            ConfigError: a line is none of ours; it is named.
        """
        if path.exists():
            self.write(path, _kept(path, keep))

    def write(self, path: Path, lines: Iterable[bytes]) -> None:
        """Write a file; it is on the disk when this returns, under another name."""
        temporary = path.with_name(f".{path.name}.tmp")
        with temporary.open("wb") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        self._files.append((temporary, path))

    def replace(self) -> None:
        """Give them their names."""
        for temporary, path in self._files:
            _rename(temporary, path)


def _kept(path: Path, keep: Callable[[Mapping[str, Any]], bool]) -> Iterator[bytes]:
    for number, line in enumerate(whole_lines(path), 1):
        try:
            kept = keep(record_of(line))
        except DAMAGED as error:
            raise ConfigError(
                f"resume: line {number} of {str(path)!r} is damaged ({type(error).__name__}: "
                f"{error}); delete the line"
            ) from error
        if kept:
            yield line


def record_of(line: bytes) -> dict[str, Any]:
    """The JSON mapping in a line; one of `DAMAGED` if it holds something else."""
    record = json.loads(line)
    if not isinstance(record, dict):
        raise TypeError(f"{record!r} is not a mapping")
    return record


def whole_lines(path: Path) -> Iterator[bytes]:
    """Lines with their end: the last one may have none, and is left out."""
    if path.exists():
        with path.open("rb") as file:
            yield from (line for line in file if line.endswith(b"\n"))


def _rename(temporary: Path, path: Path) -> None:
    temporary.replace(path)
