"""What a run left in its folder, read as far as it can be read.

A run may be going on, have been killed in the middle of a line, or have been copied in part. What
cannot be read is left out and said; nothing of it ends the report.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from asyncflow_core import metrics
from asyncflow_core.cli.report.record import Sample
from asyncflow_core.config import RunConfig
from asyncflow_core.config_source import ConfigSource
from asyncflow_core.errors import ConfigError, DataError
from asyncflow_core.flow.running.results import Summary
from asyncflow_core.flow.running.rewriting import DAMAGED, record_of
from asyncflow_core.flow.running.status import STATUS_FILE, Status

__all__ = ["RunFiles", "read_run"]

_TAIL_BYTES = 16 << 20
"""Of samples, which may be gigabytes: the last steps' tell what the model does."""
_LARGEST = 1e100
"""No figure is that large; squares and sums of what is smaller are finite."""
_VERSIONS = 2**31
_SUMMARY = TypeAdapter(Summary)
_BROKEN = (*DAMAGED, RecursionError, OverflowError)

_Record = TypeVar("_Record")
_Whole = TypeVar("_Whole", Status, Summary)


@dataclass(slots=True)
class RunFiles:
    """What was found.

    Attributes:
        folder: of the run.
        config, status, summary: None where the file is missing or not to be read.
        steps: of each step its metrics, finite numbers only, by version.
        not_finite: of a step the metrics that were no finite number, where there are any.
        evaluations: the same as steps of each evaluation, by the version that was evaluated.
        life: how often the run was resumed.
        samples: of the end of the file, oldest first. samples_cut: whether there are earlier ones.
        stepped_at: when the last step was written, seconds since 1970; None where it is unknown.
        logs: names of the files in logs/.
        notes: what could not be read.
    """

    folder: Path
    config: RunConfig | None = None
    status: Status | None = None
    summary: Summary | None = None
    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    not_finite: dict[int, list[str]] = field(default_factory=dict)
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    life: int = 0
    samples: list[Sample] = field(default_factory=list)
    samples_cut: bool = False
    stepped_at: float | None = None
    logs: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_run(folder: Path) -> RunFiles:
    """Read everything; an error only says what is missing in `notes`."""
    files = RunFiles(folder)
    try:
        files.config = ConfigSource.from_file(folder / "config.yaml").build()
    except ConfigError as error:
        files.notes.append(f"config.yaml cannot be read: {error.faults[0]}")
    except RecursionError:  # brackets within brackets
        files.notes.append("config.yaml cannot be read: it is nested too deeply")
    files.status = _whole(files, STATUS_FILE, Status.from_json, needed=True)
    files.summary = _whole(files, "summary.json", _SUMMARY.validate_json, needed=False)
    for version, life, figures, lacking in _records(files, "metrics.jsonl", _step):
        files.steps[version] = figures
        files.life = max(files.life, life)
        if lacking:
            files.not_finite[version] = lacking
    for version, figures in _records(files, "evaluations.jsonl", _evaluation):
        files.evaluations[version] = figures
    files.samples = list(_records(files, "samples.jsonl", _sample, tail_bytes=_TAIL_BYTES))
    try:
        files.stepped_at = (folder / "metrics.jsonl").stat().st_mtime
        files.logs = sorted(log.name for log in (folder / "logs").iterdir())
    except OSError:
        pass  # none was written yet
    return files


def _whole(
    files: RunFiles, name: str, parse: Callable[[bytes], _Whole], *, needed: bool
) -> _Whole | None:
    """A file that is written whole or not at all."""
    try:
        found = parse((files.folder / name).read_bytes())
        _check(dataclasses.asdict(found))
    except FileNotFoundError:
        if needed:
            files.notes.append(f"{name} is not there: what only it tells is left out")
    except OSError as error:
        files.notes.append(f"{name} cannot be read: {error.strerror}")
    except ValidationError as error:
        files.notes.append(f"{name} cannot be read: {error.errors()[0]['msg']}")
    except DataError as error:
        files.notes.append(f"{name} cannot be read: {error}")
    else:
        return found
    return None


def _check(value: Any) -> None:
    """Refuse numbers that nothing counts up to, which arithmetic could not bear."""
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple):
        for item in value:
            _check(item)
    elif isinstance(value, int | float) and not abs(value) < _LARGEST:
        raise DataError(f"{value:.3g} is no figure of a run")


def _records(
    files: RunFiles,
    name: str,
    parse: Callable[[Mapping[str, Any]], _Record],
    *,
    tail_bytes: int | None = None,
) -> Iterator[_Record]:
    """What the lines of a file hold; the damaged ones are noted, the first with its cause."""
    damaged, first = 0, ""
    try:
        for number, line in _lines(files, name, tail_bytes):
            try:
                yield parse(record_of(line))
            except _BROKEN as error:
                if not line.endswith(b"\n"):
                    files.notes.append(
                        f"the last line of {name} is not whole and was left out: it was being "
                        f"written, or cut off"
                    )
                    continue
                damaged += 1
                first = first or f"{number} ({type(error).__name__}: {str(error)[:80]})"
    except FileNotFoundError:
        pass  # no step, no evaluation, no row yet
    except OSError as error:
        files.notes.append(f"{name} cannot be read: {error.strerror}")
    if damaged:
        more = f" and {damaged - 1} more" if damaged > 1 else ""
        files.notes.append(f"damaged lines of {name} were left out: {first}{more}")


def _lines(files: RunFiles, name: str, tail_bytes: int | None) -> Iterator[tuple[str, bytes]]:
    """Lines with what a note calls them; of a longer file, those of its end."""
    path = files.folder / name
    with path.open("rb") as file:
        start = path.stat().st_size - (tail_bytes or 0)
        if tail_bytes is not None and start > 0:
            files.samples_cut = True
            file.seek(start - 1)
            file.readline()  # the rest of one, or only the end of the one before
            while line := file.readline():
                yield f"at byte {file.tell() - len(line)}", line
            return
        for number, line in enumerate(file, 1):
            yield f"line {number}", line


def _step(line: Mapping[str, Any]) -> tuple[int, int, dict[str, float], list[str]]:
    figures = _figures(line)
    lacking = [key for key in line if "/" in key and key not in figures]
    return _version(line["version"]), _version(line.get("life", 0)), figures, lacking


def _evaluation(line: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
    return int(line[metrics.EVAL_VERSION]), _figures(line)


def _version(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _VERSIONS:
        raise ValueError(f"{value!r} is no version")
    return value


def _figures(line: Mapping[str, Any]) -> dict[str, float]:
    """What is a number, and finite: the run writes null for what is not."""
    found = {k: float(v) for k, v in line.items() if type(v) in (int, float) and "/" in k}
    return {key: value for key, value in found.items() if abs(value) < _LARGEST}


def _sample(line: Mapping[str, Any]) -> Sample:
    versions = [(int(version), int(tokens)) for version, tokens in line["versions"]]
    reward = line["reward"]
    return Sample(
        key=str(line["key"]),
        batch=None if line["batch"] is None else _version(line["batch"]),
        prompt=_text(line["prompt"]),
        response=_text(line["response"]),
        reward=float(reward) if type(reward) in (int, float) and math.isfinite(reward) else None,
        reward_error=str(line.get("reward_error") or ""),
        tokens=sum(tokens for _, tokens in versions),
        oldest=min((version for version, _ in versions), default=0),
        newest=max((version for version, _ in versions), default=0),
        finish_reason=str(line["finish_reason"]),
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
