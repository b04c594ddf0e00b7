"""What a run's files say, as answers to a user's questions. Pure."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from asyncflow_core import metrics
from asyncflow_core.cli.report.reading import RunFiles
from asyncflow_core.cli.report.record import (
    Ages,
    Learning,
    Report,
    Sample,
    Samples,
    Score,
    Trend,
    Weights,
)
from asyncflow_core.cli.report.times import Steps, column, most, spent, times_of
from asyncflow_core.cli.words import silence_s
from asyncflow_core.flow.running.status import Tokens

__all__ = ["make_report", "trend"]

ROSE, FELL, UNCLEAR = "rose", "fell", "did not change for sure"

_PART = 0.1
"""Share of the steps whose mean is a run's begin, or its end."""
_CERTAIN = 2.0
"""Standard errors beyond which a difference counts."""
_WASTED = 0.2
_LAST_STEPS = 5
_CAUSES = 5


def make_report(files: RunFiles, *, now: float) -> Report:
    """The report; `now` in seconds since 1970."""
    status, config, summary = files.status, files.config, files.summary
    report = Report(
        run=status.run if status else config.name if config else files.folder.name,
        folder=str(files.folder),
        state=status.state if status else "finished" if summary else "unknown",
        preset=status.preset if status else config.workflow.preset if config else "",
        error=status.error if status else "",
        silent_s=silence_s(status, now) if status else 0.0,
        version=max([*files.steps, status.version if status else 0]),
        steps=status.steps if status else config.workflow.steps if config else 0,
        life=files.life,
        learning=_learning(files),
        times=times_of(files),
        staleness=_ages(files),
        weights=_weights(files.steps),
        samples=_samples(files),
        tokens=_tokens(files),
        dropped=_dropped(files),
        masked=summary.rows_masked if summary else 0,
        restarts=_restarts(files),
        logs=list(files.logs),
        notes=list(files.notes),
    )
    return replace(report, warnings=list(_warnings(report, files)))


def _learning(files: RunFiles) -> Learning:
    config, summary = files.config, files.summary
    failed = [sample.reward_error for sample in files.samples if sample.reward_error]
    counted = sum(column(files.steps, metrics.REWARD_ERRORS).values())
    return Learning(
        reward=trend(list(column(files.steps, metrics.REWARD_MEAN).values())),
        scores=_scores(files),
        success=config.evaluation.success if config and config.evaluation else 1.0,
        errors=max(summary.reward_errors if summary else 0, int(counted), len(failed)),
        causes=dict(Counter(failed).most_common(_CAUSES)),
    )


def _weights(steps: Steps) -> Weights:
    return Weights(
        published=len(column(steps, metrics.WEIGHTS_BYTES)),
        nbytes=int(most(steps, metrics.WEIGHTS_BYTES)),
        publish=spent(column(steps, metrics.WEIGHTS_PUBLISH_S)),
        stage=spent(column(steps, metrics.WEIGHTS_STAGE_S)),
        commit=spent(column(steps, metrics.WEIGHTS_COMMIT_S)),
        failures=int(most(steps, metrics.WEIGHTS_FAILURES)),
        compared=int(most(steps, metrics.WEIGHTS_COMPARED)),
    )


def _samples(files: RunFiles) -> Samples:
    return Samples(
        chosen=_chosen(files.samples),
        read=len(files.samples),
        complete=not files.samples_cut,
        finish=_finish(files.samples),
    )


def trend(values: Sequence[float]) -> Trend | None:
    """How a run's values went, judged against how much they vary from step to step.

    The variation inside the two parts holds some of the change itself: the word is careful.
    """
    if not values:
        return None
    number = max(1, round(len(values) * _PART))
    begin, end = values[:number], values[-number:]
    change = statistics.fmean(end) - statistics.fmean(begin)
    error, word = None, ""
    if number > 1:
        variance = (statistics.variance(begin) + statistics.variance(end)) / number
        error = math.sqrt(variance)
        word = UNCLEAR
        if abs(change) > _CERTAIN * error:
            word = ROSE if change > 0 else FELL
    return Trend(
        values[0],
        values[-1],
        number,
        statistics.fmean(begin),
        statistics.fmean(end),
        error,
        word,
    )


def _scores(files: RunFiles) -> list[Score]:
    known: dict[int, float] = dict(files.status.scores) if files.status else {}
    found = {version: Score(version, score, 0) for version, score in known.items()}
    for version, figures in files.evaluations.items():
        if metrics.EVAL_SCORE in figures:
            rows = int(figures.get(metrics.EVAL_ROWS, 0))
            found[version] = Score(version, figures[metrics.EVAL_SCORE], rows)
    return [found[version] for version in sorted(found)]


def _ages(files: RunFiles) -> Ages:
    """The histogram from the status, else the summary; without both, what the steps tell."""
    status, summary, steps = files.status, files.summary, files.steps
    bound = files.config.workflow.bound if files.config else None
    rows: dict[int, int] = {}
    if status is not None:
        bound, rows = status.staleness.bound, status.staleness.rows
    elif summary is not None:
        bound = summary.max_staleness_allowed
        rows = {int(n): count for n, count in summary.rows_by_staleness.items()}
    means = column(steps, metrics.STALENESS_MEAN).values()
    total = sum(rows.values())
    mean = sum(n * count for n, count in rows.items()) / total if total else 0.0
    return Ages(
        bound=bound,
        rows=dict(sorted(rows.items())),
        mean=mean if total or not means else statistics.fmean(means),
        largest=max([*rows, int(most(steps, metrics.STALENESS_MAX))]),
        updates=int(most(steps, metrics.STALENESS_UPDATES_MAX)),
    )


def _tokens(files: RunFiles) -> Tokens:
    summary = files.summary
    if summary is not None:
        return Tokens(
            generated=summary.tokens_generated,
            trained=summary.tokens_trained,
            evaluated=summary.tokens_evaluated,
            kept=int(most(files.steps, metrics.ROLLOUT_TOKENS_KEPT)),
            wasted=dict(summary.tokens_wasted_by_reason),
        )
    return files.status.tokens if files.status else Tokens()


def _dropped(files: RunFiles) -> dict[str, int]:
    if files.summary is not None:
        return dict(files.summary.rows_dropped_by_reason)
    return dict(files.status.store.rows_dropped) if files.status else {}


def _restarts(files: RunFiles) -> dict[str, int]:
    if files.summary is not None:
        return dict(files.summary.restarts)
    times = int(most(files.steps, metrics.RESTARTS))
    return {"all": times} if times else {}


def _chosen(samples: Sequence[Sample]) -> dict[str, Sample]:
    """Training rows worth a look: of equal ones the latest, none twice."""
    trained = [sample for sample in samples if sample.batch is not None] or list(samples)
    if not trained:
        return {}
    rated = [(sample.reward, at) for at, sample in enumerate(trained) if sample.reward is not None]
    places = {"last": len(trained) - 1}
    if rated:
        places = {
            "best": max(rated)[1],
            "worst": max((-reward, at) for reward, at in rated)[1],
            **places,
        }
    chosen: dict[str, Sample] = {}
    taken: dict[int, str] = {}
    for why, at in places.items():
        taken[at] = f"{taken[at]}, {why}" if at in taken else why
    for at, why in taken.items():
        chosen[why] = trained[at]
    return chosen


def _finish(samples: Sequence[Sample]) -> dict[str, int]:
    """Of the last steps' training rows."""
    newest = max((sample.batch for sample in samples if sample.batch is not None), default=0)
    reasons = (
        sample.finish_reason
        for sample in samples
        if sample.batch is not None and sample.batch > newest - _LAST_STEPS
    )
    return dict(Counter(reasons).most_common())


def _warnings(report: Report, files: RunFiles) -> Iterator[str]:
    """What a user should look at first."""
    learning, ages, weights = report.learning, report.staleness, report.weights
    if not files.steps:
        yield "no step was recorded"
    if ages.bound is not None and ages.largest > ages.bound:
        yield (
            f"a row of staleness {ages.largest} was trained, above the bound of {ages.bound}: "
            f"this must not happen, please report it"
        )
    if learning.errors:
        why = next(iter(learning.causes), "see reward_error in samples.jsonl")
        yield f"{learning.errors} rewards failed and count 0: {why}"
    if learning.reward is not None and learning.reward.word in (FELL, UNCLEAR):
        yield f"the reward {learning.reward.word}"
    spread = list(column(files.steps, metrics.REWARD_STD).values())[-_LAST_STEPS:]
    if spread and not any(spread):
        yield (
            f"all rewards of the last {len(spread)} steps were equal, which teaches nothing; try "
            f"easier or harder prompts, or a reward that tells more"
        )
    if files.not_finite:
        first = min(files.not_finite)
        names = ", ".join(files.not_finite[first])
        yield f"no finite number in {len(files.not_finite)} steps, first in step {first}: {names}"
    wasted = sum(report.tokens.wasted.values())
    if wasted > _WASTED * report.tokens.generated:
        yield f"{wasted / report.tokens.generated:.0%} of the generated tokens were wasted"
    if times := sum(report.restarts.values()):
        yield f"{times} times a process was started again; their logs say why"
    if weights.failures:
        yield f"{weights.failures} stages or commits of weights failed and were tried again"
