"""Going on with a run that ended: what is checked, what is void, what the new life begins with.

What ran after the checkpoint is void. Lines of `metrics.jsonl` and `samples.jsonl` that tell of it
are cut by what they say (version, batch), so it does not matter how far the files had got.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from asyncflow_core import metrics
from asyncflow_core.config import RunConfig
from asyncflow_core.errors import ConfigError
from asyncflow_core.flow.running.assigned import Assigned
from asyncflow_core.flow.running.checkpoint import Checkpoint, Checkpoints
from asyncflow_core.flow.running.rewriting import DAMAGED, Rewriting, record_of, whole_lines
from asyncflow_core.flow.running.totals import Totals

__all__ = [
    "NOTES",
    "TOTALS",
    "Start",
    "begin_again",
    "config_faults",
    "first_life",
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
        dropped: groups of batches that are not trained, dropped by the time of the checkpoint.
        notes: records of assignments in the file.
        totals: counters, None for fresh ones.
        tokens_redone: response tokens of recorded rows that are not trained.
        tokens_void: those of them that are of versions after the checkpoint.
    """

    life: int = 0
    version: int = 0
    trainer: Path | None = None
    assigned: Assigned = field(default_factory=Assigned)
    dropped: int = 0
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
        ConfigError: the run is complete, a file of it is damaged, or the configuration changed in
            what it must not; nothing was changed.
    """
    version, steps = resumable(run), config.workflow.steps
    checkpoints = Checkpoints(run)
    checkpoint = checkpoints.load(version)
    if faults := config_faults(checkpoint.config, config):
        raise ConfigError(faults)
    _check_steps(run, version, steps)
    totals, assigned = _counted(checkpoint)
    dropped = assigned.dropped
    life = _last_life(run, checkpoint) + 1
    files = Rewriting()
    files.cut(run / "metrics.jsonl", lambda line: line["version"] <= version)
    files.cut(run / "evaluations.jsonl", lambda line: line[metrics.EVAL_VERSION] in totals.scores)
    redone, void = _cut_samples(files, run / "samples.jsonl", version, totals)
    exact = config.checkpoint.resume == "exact"
    notes, count = _cut_notes(files, run / NOTES, checkpoint.notes, exact=exact)
    for note in notes:
        assigned.apply(note)
    assigned.close(version)
    _write_life(run, life)
    (run / "summary.json").unlink(missing_ok=True)
    shutil.rmtree(run / "model", ignore_errors=True)
    files.replace()
    return Start(
        life=life,
        version=version,
        trainer=checkpoints.trainer(version),
        assigned=assigned,
        dropped=dropped,
        notes=count,
        totals=totals,
        tokens_redone=redone,
        tokens_void=void,
    )


def first_life(run: Path) -> int:
    """The life of a run that begins; it is on the disk when this returns."""
    _write_life(run, 0)
    return 0


def _check_steps(run: Path, version: int, steps: int) -> None:
    if version > steps:
        raise ConfigError(
            f"workflow.steps: {version} steps are completed, {steps} are asked for; ask for "
            f"{version} or more, or delete checkpoints above step {steps} to go back"
        )
    if version == steps and (run / "summary.json").exists():
        raise ConfigError(
            f"resume: the run in {str(run)!r} is complete, {version} of {steps} steps; to train "
            f"more, give workflow.steps=N"
        )


def _counted(checkpoint: Checkpoint) -> tuple[Totals, Assigned]:
    """The counters and the assignments of a checkpoint whose checksum is right."""
    try:
        totals = TOTALS.validate_python(checkpoint.totals)
        assigned = Assigned.load(checkpoint.assigned)
    except (ValidationError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"resume: the record of checkpoint {checkpoint.version} is not one of this release "
            f"({error}); resume with the release that wrote it, or start the run anew"
        ) from error
    totals.begun = False
    return totals, assigned


def _last_life(run: Path, checkpoint: Checkpoint) -> int:
    """The number of the life before, which a run that has a checkpoint wrote down."""
    path = run / _LIFE
    try:
        life = json.loads(path.read_bytes())["life"]
        if type(life) is not int or life < checkpoint.life:
            raise ValueError(f"{life!r} is no number from {checkpoint.life} up")
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"resume: the file {str(path)!r} is damaged ({error}); it counts how often the run was "
            f'resumed: write {{"life": N}} into it, N the largest "life" in metrics.jsonl or more'
        ) from error
    return int(life)


def _write_life(run: Path, life: int) -> None:
    files = Rewriting()
    files.write(run / _LIFE, [json.dumps({"life": life}).encode() + b"\n"])
    files.replace()


def _cut_samples(files: Rewriting, path: Path, version: int, totals: Totals) -> tuple[int, int]:
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

    files.cut(path, keep)
    return redone, void


def _cut_notes(
    files: Rewriting, path: Path, covered: int, *, exact: bool
) -> tuple[list[dict[str, Any]], int]:
    """Keep all records, with `exact` those that the checkpoint covers; the ones it does not cover.

    Returns:
        Those, and how many there are in all.
    """
    lines = list(whole_lines(path))
    if exact:
        lines = lines[:covered]
    elif len(lines) < covered:
        raise ConfigError(
            f"resume: {str(path)!r} has {len(lines)} whole lines, the checkpoint was made after "
            f"{covered}; {_OR_EXACT}"
        )
    notes = []
    for number, line in enumerate(lines[covered:], covered + 1):
        try:
            notes.append(record_of(line))
            Assigned().apply(notes[-1])
        except DAMAGED as error:
            raise ConfigError(
                f"resume: line {number} of {str(path)!r} is damaged ({error}); {_OR_EXACT}"
            ) from error
    files.write(path, lines)
    return notes, len(lines)


_OR_EXACT = "bring it back, or resume with checkpoint.resume=exact, which does without"
