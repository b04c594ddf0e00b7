"""Going on with a run that ended: what is checked, what is void, what the new life begins with.

What ran after the checkpoint is void. Lines of `metrics.jsonl` and `samples.jsonl` that tell of it
are cut by what they say (version, batch), so it does not matter how far the files had got.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from asyncflow_core import metrics
from asyncflow_core.config import RunConfig
from asyncflow_core.errors import ConfigError
from asyncflow_core.flow.running.assigned import Assigned
from asyncflow_core.flow.running.checkpoint import Checkpoints
from asyncflow_core.flow.running.totals import Totals

__all__ = [
    "NOTES",
    "TOTALS",
    "Start",
    "begin_again",
    "config_faults",
    "next_life",
    "resumable",
]

NOTES = "admitted.jsonl"
"""File of the records of `Assigned`."""
_LIFE = "life.json"
TOTALS = TypeAdapter(Totals)
"""To and from plain values."""

_FIXED = ("seed", "model", "tokenizer", "prompts", "workflow")
_FREE = ("steps", "pacing")
"""Of `workflow`."""
_FIXED_PLUGINS = ("rollout", "trainer", "loss", "data_store")
_FIXED_OF_STAGES = (
    "plugin",
    "function",
    "model",
    "kind",
    "reads",
    "writes",
    "whole_groups",
    "partitions",
)


@dataclass(frozen=True, slots=True)
class Start:
    """Where a life of a run begins; by default, its first.

    Attributes:
        life: counts from 0.
        version: completed steps.
        trainer: what the trainer loads; None for its first weights.
        assigned: which prompts went where.
        notes: records of assignments in the file.
        totals: counters, None for fresh ones.
        tokens_redone: response tokens of recorded rows that are not trained.
        tokens_void: those of them that are of versions after the checkpoint.
    """

    life: int = 0
    version: int = 0
    trainer: Path | None = None
    assigned: Assigned = field(default_factory=Assigned)
    notes: int = 0
    totals: Totals | None = None
    tokens_redone: int = 0
    tokens_void: int = 0


def resumable(run: Path) -> int:
    """The step that a run would be resumed from; nothing is changed.

    Raises:
        ConfigError: there is no such run, or it has no checkpoint.
    """
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"resume: there is no run in {str(run)!r}; name a folder like runs/NAME")
    versions = Checkpoints(run).versions()
    if not versions:
        raise ConfigError(
            f"resume: the run in {str(run)!r} has no checkpoint; start it anew, with "
            f"checkpoint.every=N it is saved every N steps"
        )
    return versions[-1]


def config_faults(before: Mapping[str, Any], config: RunConfig) -> list[str]:
    """What differs from the configuration of the checkpoint and must not.

    Rows, prompts and weights of the checkpoint were made under it. Everything else may change:
    steps, name, learning rate, replicas, devices, evaluation, checkpoints, ...
    """
    try:
        old = RunConfig.model_validate(before).model_dump(mode="json")
    except ValidationError as error:
        return [f"resume: the checkpoint's configuration is not one of this release: {error}"]
    new = config.model_dump(mode="json")
    return [
        f"{path}: a resumed run keeps it, the checkpoint has {was!r}, now it is {now!r}"
        for (path, was), (_, now) in zip(_fixed(old), _fixed(new), strict=False)
        if was != now
    ] + _stage_faults(old["stages"], new["stages"])


def _fixed(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in _FIXED:
        value = values[name]
        if name == "workflow":
            yield from ((f"{name}.{k}", v) for k, v in value.items() if k not in _FREE)
        else:
            yield name, value
    for name in _FIXED_PLUGINS:
        yield f"{name}.plugin", values[name]["plugin"]
    models = values["models"].items()
    yield "models", {name: (model["plugin"], model["options"]) for name, model in models}


def _stage_faults(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    if old.keys() != new.keys():
        return [
            f"stages: a resumed run keeps them, the checkpoint has {sorted(old)}, "
            f"now there are {sorted(new)}"
        ]
    return [
        f"stages.{name}.{key}: a resumed run keeps it, the checkpoint has {old[name][key]!r}, "
        f"now it is {new[name][key]!r}"
        for name in old
        for key in _FIXED_OF_STAGES
        if old[name][key] != new[name][key]
    ]


def begin_again(run: Path, config: RunConfig) -> Start:
    """Check the newest checkpoint, cut what is void, begin the next life of a locked run folder.

    Killed at any moment, it can be called again.

    Raises:
        ConfigError: the run is complete, the checkpoint is damaged, or the configuration changed
            in what it must not; nothing was changed.
    """
    version, steps = resumable(run), config.workflow.steps
    checkpoints = Checkpoints(run)
    checkpoint = checkpoints.load(version)
    if faults := config_faults(checkpoint.config, config):
        raise ConfigError(faults)
    if version > steps:
        raise ConfigError(f"workflow.steps: {version} steps are completed, {steps} are asked for")
    if version == steps and (run / "summary.json").exists():
        raise ConfigError(
            f"resume: the run in {str(run)!r} is complete, {version} of {steps} steps; to train "
            f"more, give workflow.steps=N"
        )
    totals = TOTALS.validate_python(checkpoint.totals)
    totals.begun = False
    life = next_life(run)
    (run / "summary.json").unlink(missing_ok=True)
    shutil.rmtree(run / "model", ignore_errors=True)
    _cut(run / "metrics.jsonl", lambda line: line["version"] <= version)
    _cut(run / "evaluations.jsonl", lambda line: line[metrics.EVAL_VERSION] in totals.scores)
    redone, void = _cut_samples(run / "samples.jsonl", version, totals)
    exact = config.checkpoint.resume == "exact"
    notes = _cut_notes(run / NOTES, checkpoint.notes if exact else None)
    assigned = Assigned.load(checkpoint.assigned)
    for note in notes[checkpoint.notes :]:
        assigned.apply(note)
    assigned.close(version)
    return Start(
        life=life,
        version=version,
        trainer=checkpoints.trainer(version),
        assigned=assigned,
        notes=len(notes),
        totals=totals,
        tokens_redone=redone,
        tokens_void=void,
    )


def next_life(run: Path) -> int:
    """Count one more life of a run; 0 is the first. It is on the disk when this returns."""
    path = run / _LIFE
    life = json.loads(path.read_bytes())["life"] + 1 if path.exists() else 0
    _write(path, [json.dumps({"life": life}) + "\n"])
    return life


def _cut_samples(path: Path, version: int, totals: Totals) -> tuple[int, int]:
    """Keep what is trained and what was evaluated; response tokens cut, and void ones of them."""
    redone = void = 0

    def keep(line: Mapping[str, Any]) -> bool:
        nonlocal redone, void
        newest = max((found for found, _ in line["versions"]), default=0)
        if line["batch"] is None:  # the epoch of its key is the version that was evaluated
            return int(line["key"].split("/")[1]) in totals.scores
        if line["batch"] < version:
            return True
        tokens = sum(count for _, count in line["versions"])
        redone += tokens
        void += tokens if newest > version else 0
        return False

    _cut(path, keep)
    return redone, void


def _cut_notes(path: Path, first: int | None) -> list[dict[str, Any]]:
    """Keep the first so many records, None for all that are whole."""
    notes = list(_lines(path))[:first]
    _write(path, (f"{json.dumps(note)}\n" for note in notes))
    return notes


def _cut(path: Path, keep: Callable[[Mapping[str, Any]], bool]) -> None:
    if path.exists():
        _write(path, (f"{json.dumps(line)}\n" for line in _lines(path) if keep(line)))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Lines that are whole: the last one may not be."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ConfigError(
                    f"resume: line {number} of {str(path)!r} is damaged ({error}); delete the line"
                ) from error


def _write(path: Path, lines: Iterable[str]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
