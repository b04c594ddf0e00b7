"""Which rows a stage's processes work on, so that those that end a process are found.

A reward may never return, or take its process with it; only the run's files outlive that. Each
process writes down the rows of its call before it makes it. Rows of a call that did not return are
suspects: each is called alone the next time, and is given up when its process ends once more.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from asyncflow_core.batch import GroupKey, Key
from asyncflow_core.services.data_store import RowInfo

__all__ = ["ATTEMPTS", "CallLog"]

ATTEMPTS = 2
"""Calls a row may be in that do not return: one with others, one alone."""


class CallLog:
    """The calls of one stage, of all its processes, in a directory they share."""

    def __init__(self, directory: Path) -> None:
        """Make the directory, if it is not there."""
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._suspects = directory / "suspects"
        self._read = 0
        self._counts: Counter[Key] = Counter()

    @classmethod
    def of(cls, run_dir: Path, task: str) -> CallLog:
        """Of a stage of a run."""
        return cls(run_dir / "calls" / task)

    def begin(self, worker: str, rows: Sequence[RowInfo]) -> None:
        """A process is about to make a call."""
        self._call(worker).write_text(json.dumps([info.key for info in rows]), encoding="utf-8")

    def end(self, worker: str) -> None:
        """The call came back, with whatever."""
        self._call(worker).unlink(missing_ok=True)

    def hung(self, worker: str) -> bool:
        """A process ended, or will: whether it was in a call; its rows are suspects from now on."""
        call, gone = self._call(worker), self._call(worker).with_suffix(".hung")
        if gone.exists():  # it has said so itself
            gone.unlink()
            return True
        try:
            rows = call.read_text(encoding="utf-8")
        except FileNotFoundError:
            return False
        with self._suspects.open("a", encoding="utf-8") as file:
            file.write(f"{rows}\n")
        call.unlink()
        return True

    def give_up(self, worker: str) -> None:
        """The call of this process will not come back; `hung`, asked after its end, knows then."""
        if self.hung(worker):
            self._call(worker).with_suffix(".hung").touch()

    def suspects(self) -> Mapping[Key, int]:
        """Rows to calls they were in that did not return."""
        try:
            with self._suspects.open(encoding="utf-8") as file:
                file.seek(self._read)
                for line in iter(file.readline, ""):
                    self._counts.update(Key(*key) for key in json.loads(line))
                self._read = file.tell()
        except FileNotFoundError:
            pass
        return self._counts

    def parts(self, rows: Sequence[RowInfo], *, whole_groups: bool) -> Iterator[list[int]]:
        """Positions of rows to call together: suspects alone, or with their group."""
        suspects = self.suspects()
        alone: dict[Key | GroupKey, list[int]] = {}
        together = []
        for position, info in enumerate(rows):
            if info.key in suspects:
                unit = info.key.group if whole_groups else info.key
                alone.setdefault(unit, []).append(position)
            else:
                together.append(position)
        if together:
            yield together
        yield from alone.values()

    def given_up(self, row: RowInfo) -> bool:
        """Whether no further call is made of this row."""
        return self._counts[row.key] >= ATTEMPTS

    def _call(self, worker: str) -> Path:
        return self._directory / f"{worker}.call"
