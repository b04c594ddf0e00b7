"""Where a run's time went, and what held it up. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from asyncflow_core import metrics
from asyncflow_core.cli.report.reading import RunFiles
from asyncflow_core.cli.report.record import Spent, Times
from asyncflow_core.cli.words import LIVE
from asyncflow_core.flow.running.status import Bottleneck, Status, WorkerStatus, bottleneck

__all__ = ["Steps", "column", "most", "spent", "times_of"]

Steps = Mapping[int, Mapping[str, float]]
"""Version to metrics."""

_AFTER_S = 3.0
"""So long after the last step the last seconds' shares still tell of the training."""


def times_of(files: RunFiles) -> Times:
    """Everything about time."""
    status, summary, steps = files.status, files.summary, files.steps
    wall = column(steps, metrics.STEP_WALL_S)
    train_s = sum(wall.values())
    trained = sum(column(steps, metrics.TRAINER_TOKENS).values())
    parts = _parts(steps)
    workers = _workers(files, parts)
    return Times(
        total_s=summary.total_s if summary else status.elapsed_s if status else 0.0,
        train_s=train_s,
        step=spent(wall),
        parts=parts,
        tokens_per_s=trained / train_s if train_s else 0.0,
        workers=workers,
        bottleneck=_bottleneck(files, workers),
    )


def column(steps: Steps, name: str) -> dict[int, float]:
    """Version to value, where there is one, in order."""
    return {version: steps[version][name] for version in sorted(steps) if name in steps[version]}


def most(steps: Steps, name: str) -> float:
    """The largest; of a counter since the start that is the last, unless a resume began anew."""
    return max(column(steps, name).values(), default=0.0)


def spent(seconds: Mapping[int, float]) -> Spent:
    """Of seconds by version."""
    if not seconds:
        return Spent()
    at = max(seconds, key=lambda version: seconds[version])
    return Spent(statistics.fmean(seconds.values()), seconds[at], at)


def _parts(steps: Steps) -> dict[str, float]:
    """Shares of all steps' time by what the trainer did; together 1."""
    wall = sum(column(steps, metrics.STEP_WALL_S).values())
    if not wall:
        return {}
    seconds = {
        "trains": sum(column(steps, metrics.TRAINER_BUSY_S).values()),
        "waits for rows": sum(column(steps, metrics.TRAINER_WAIT_S).values()),
        "saves": sum(column(steps, metrics.CHECKPOINT_SAVE_S).values()),
    }
    # A step may begin before the one before it is recorded, so these may add up to more.
    whole = max(wall, sum(seconds.values()))
    shares = {name: part / whole for name, part in seconds.items()}
    return {**shares, "between": max(0.0, 1.0 - sum(shares.values()))}


def _workers(files: RunFiles, parts: Mapping[str, float]) -> list[WorkerStatus]:
    """The workers of the last status, with what is known of them over the whole run."""

    def over_the_run(worker: WorkerStatus) -> WorkerStatus:
        if worker.task == "train" and parts:
            return replace(worker, busy=parts["trains"], wait=parts["waits for rows"])
        if worker.task == "rollout" and files.summary is not None:
            return replace(worker, busy=min(1.0, files.summary.busy_rollout))
        return worker

    return [over_the_run(worker) for worker in files.status.workers] if files.status else []


def _bottleneck(files: RunFiles, workers: Sequence[WorkerStatus]) -> Bottleneck:
    """By the rules of `asyncflow top`, over the whole run as far as it is known."""
    status = files.status
    if status is None or not files.steps:
        return Bottleneck()
    judged = list(workers)
    if not _tells_of_training(status, files.stepped_at):
        judged = [w for w in workers if w.task in ("train", "rollout", "record")]
    return bottleneck(judged, status.store, bound=status.staleness.bound, preset=status.preset)


def _tells_of_training(status: Status, stepped_at: float | None) -> bool:
    """Whether the last seconds' shares are of training, not of what came after it.

    Unknown where the files were copied and are younger than what they say.
    """
    if status.state in LIVE:
        return True
    return stepped_at is not None and -1.0 <= status.time - stepped_at <= _AFTER_S
