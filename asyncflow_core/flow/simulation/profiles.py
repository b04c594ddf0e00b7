"""From what runs left in their folders to what their services take. Pure: texts in, times out.

Of each run: `config.yaml` as it was resolved, `metrics.jsonl`, `samples.jsonl`, `summary.json`.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncflow_core import metrics
from asyncflow_core.config import RunConfig
from asyncflow_core.errors import DataError
from asyncflow_core.flow.simulation import fitting
from asyncflow_core.flow.working.costs import Costs

__all__ = ["Profile", "measured", "read_profile"]

_SETTLED = 3
"""Steps at the start of a run that are not taken, if there are twice as many."""
_LATEST = 200
"""Steps at its end that are taken: responses grow, and engines warm up."""


@dataclass(frozen=True, slots=True)
class Profile:
    """What one finished run says.

    Attributes:
        name: of the run.
        config: of the run.
        steps: of which the figures are: the latest, and not the first few.
        step_s: mean wall seconds of these.
        groups: tokens of their responses, a prompt group each, in the order of their batches.
        work: task to its sums, see `flow.working.costs`.
        trainer: sums of (1, tokens on a rank, 0, seconds) of each step.
        prompt: mean tokens of a prompt.
        other_s: median seconds of a step that are neither the trainer's work nor its waits.
        publish_s, stage_s, commit_s: medians over steps; `commit_s` the least of them, where a
            switch waits for running responses.
    """

    name: str
    config: RunConfig
    steps: int
    step_s: float
    groups: tuple[tuple[int, ...], ...]
    work: Mapping[str, Sequence[float]]
    trainer: Sequence[float]
    prompt: float
    other_s: float
    publish_s: float
    stage_s: float
    commit_s: float


def read_profile(
    name: str,
    config: RunConfig,
    *,
    steps: Iterable[str],
    samples: Iterable[str],
    summary: str,
    overlaps_export: bool,
) -> Profile:
    """Read one run.

    Args:
        name: of the run, for errors.
        config: of the run.
        steps: lines of `metrics.jsonl`.
        samples: lines of `samples.jsonl`.
        summary: the text of `summary.json`.
        overlaps_export: whether its trainer exports weights beside the next step.

    Raises:
        DataError: a line is no JSON, or says too little.
    """
    by_version = {step.get("version"): step for step in _lines(f"{name}: metrics.jsonl", steps)}
    found = list(by_version.values())  # of a step that a resumed run repeated, the last
    found = found[_SETTLED if len(found) >= 2 * _SETTLED else 0 :][-_LATEST:]
    rows = _lines(f"{name}: samples.jsonl", samples)
    whole = next(iter(_lines(f"{name}: summary.json", [" ".join(summary.splitlines())])), {})
    try:
        work = _work(whole)
        groups = _groups(rows, first=found[0]["version"] - 1) if found else ()
        if groups and fitting.count(work.get("rollout", ())):
            return _profile(name, config, found, groups, work, overlaps_export=overlaps_export)
    except DataError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"run {name!r} cannot be a profile: its files are not as this release writes them "
            f"({type(error).__name__}: {error}); take a run of this release"
        ) from error
    raise DataError(
        f"run {name!r} cannot be a profile: it needs a trained step in metrics.jsonl, a trained "
        f"row in samples.jsonl and `work` in summary.json, which a run of this release writes when "
        f"it has finished"
    )


def _profile(
    name: str,
    config: RunConfig,
    steps: Sequence[Mapping[str, float]],
    groups: tuple[tuple[int, ...], ...],
    work: Mapping[str, Sequence[float]],
    *,
    overlaps_export: bool,
) -> Profile:
    flow = config.workflow
    rows = flow.groups_per_step * flow.group_size
    response = statistics.fmean(step[metrics.RESPONSE_TOKENS_MEAN] for step in steps)
    tokens = statistics.fmean(step[metrics.TRAINER_TOKENS] for step in steps)
    trainer = Costs()
    for step in steps:
        on_rank = step[metrics.TRAINER_TOKENS] / config.trainer.world_size
        trainer.add(step[metrics.TRAINER_BUSY_S], on_rank, 0.0)
    mixes = flow.preset == "async" and flow.bound > 0
    exposed = 0.0 if overlaps_export else 1.0
    return Profile(
        name=name,
        config=config,
        steps=len(steps),
        step_s=statistics.fmean(step[metrics.STEP_WALL_S] for step in steps),
        groups=groups,
        work=work,
        trainer=tuple(trainer.sums),
        prompt=max(0.0, tokens / rows - response),
        other_s=max(0.0, statistics.median(_other(step, exposed) for step in steps)),
        publish_s=statistics.median(step[metrics.WEIGHTS_PUBLISH_S] for step in steps),
        stage_s=statistics.median(step[metrics.WEIGHTS_STAGE_S] for step in steps),
        commit_s=(statistics.median if mixes else min)(
            [step[metrics.WEIGHTS_COMMIT_S] for step in steps]
        ),
    )


def measured(profiles: Sequence[Profile]) -> dict[str, Any]:
    """The times that runs show together, as `Times` is written by hand.

    Sums of several runs add up. The trainer's are those of the run with most ranks; with runs of
    different rank counts its scaling is measured.
    """
    work: dict[str, tuple[float, ...]] = {}
    for profile in profiles:
        for task, sums in profile.work.items():
            work[task] = fitting.add(work.get(task, ()), sums)
    row_s, token_s, token_row_s = _rollout(work.pop("rollout"))
    most = max(profiles, key=lambda p: p.config.trainer.world_size)
    update_s, rank_token_s, _ = fitting.fit(most.trainer, (1, 0))
    stages = {}
    for task, sums in work.items():
        names = ("call_s", "row_s", "token_s")
        stages[task] = dict(zip(names, fitting.fit(sums), strict=True))
    trainer: dict[str, Any] = {
        "token_s": rank_token_s,
        "ranks": most.config.trainer.world_size,
        "update_s": update_s / most.config.workflow.updates_per_step,
        "step_s": statistics.median(profile.other_s for profile in profiles),
    }
    scaling = _scaling(profiles)
    return {
        "lengths": {
            "groups": tuple(group for profile in profiles for group in profile.groups),
            "prompt": statistics.fmean(profile.prompt for profile in profiles),
        },
        "rollout": {"row_s": row_s, "token_s": token_s, "token_row_s": token_row_s},
        "stages": stages,
        "trainer": trainer if scaling is None else {**trainer, "scaling": scaling},
        "weights": {
            "export_s": statistics.median(profile.publish_s for profile in profiles),
            "stage_s": statistics.median(profile.stage_s for profile in profiles),
            "commit_s": statistics.median(profile.commit_s for profile in profiles),
        },
    }


def _rollout(sums: Sequence[float]) -> tuple[float, ...]:
    """Where all responses are of one length, what they take is taken for their tokens'."""
    found = fitting.fit(sums)
    return found if any(found[1:]) else fitting.fit(sums, (1, 2))


def _scaling(profiles: Sequence[Profile]) -> float | None:
    """Exponent of the speed of more ranks, by the fewest and the most that were measured."""
    by_ranks = {p.config.trainer.world_size: fitting.mean(p.trainer, 3) for p in profiles}
    tokens = {
        p.config.trainer.world_size: fitting.mean(p.trainer, 1) * p.config.trainer.world_size
        for p in profiles
    }
    few, many = min(by_ranks), max(by_ranks)
    if few == many:
        return None
    speeds = {ranks: tokens[ranks] / by_ranks[ranks] for ranks in (few, many)}
    found = math.log(speeds[many] / speeds[few]) / math.log(many / few)
    return min(2.0, max(0.01, found))


def _other(step: Mapping[str, float], exposed: float) -> float:
    """Seconds of a step that are neither the trainer's work nor its waits."""
    rest = step[metrics.STEP_WALL_S] - step[metrics.TRAINER_BUSY_S] - step[metrics.TRAINER_WAIT_S]
    return rest - exposed * step[metrics.WEIGHTS_PUBLISH_S] - step[metrics.CHECKPOINT_SAVE_S]


def _groups(rows: Iterable[Mapping[str, Any]], *, first: int) -> tuple[tuple[int, ...], ...]:
    """Tokens of the responses of each group of the batches from `first` on, in their order."""
    found: dict[tuple[int, ...], dict[int, int]] = {}
    for row in rows:
        if row["batch"] is None or row["batch"] < first:
            continue
        source, epoch, sequence, sample = map(int, row["key"].split("/"))
        tokens = sum(count for _, count in row["versions"])
        group = found.setdefault((row["batch"], source, epoch, sequence), {})
        group[sample] = max(1, tokens)
    return tuple(tuple(found[key][s] for s in sorted(found[key])) for key in sorted(found))


def _work(summary: Mapping[str, Any]) -> dict[str, tuple[float, ...]]:
    """Task to its sums, of those that did anything."""
    found = {task: tuple(map(float, work["costs"])) for task, work in summary["work"].items()}
    wrong = [task for task, sums in found.items() if len(sums) != len(Costs().sums)]
    if wrong:
        raise ValueError(f"costs of {wrong} in summary.json")
    return {task: sums for task, sums in found.items() if fitting.count(sums)}


def _lines(name: str, lines: Iterable[str]) -> Iterable[dict[str, Any]]:
    for number, line in enumerate(lines, 1):
        try:
            found = json.loads(line)
        except ValueError as error:
            raise DataError(f"{name}, line {number}, is no JSON: {error}") from error
        if not isinstance(found, dict):
            raise DataError(f"{name}, line {number}, is no object but {type(found).__name__}")
        yield found
