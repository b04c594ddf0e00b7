"""What a run tells its user: a result a step, a summary at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["StepResult", "Summary", "TaskWork"]


@dataclass(frozen=True, slots=True)
class StepResult:
    """One trained global batch.

    Attributes:
        version: completed steps, this one included.
        steps: of the whole run.
        metrics: name to value; the names are constants of `asyncflow_core.metrics`.
    """

    version: int
    steps: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TaskWork:
    """What the workers of one task did, since they were started last.

    Attributes:
        workers: that answered at the end.
        rows: finished. busy_s: seconds they worked on them, summed over workers.
        costs: sums from which `asyncflow plan` finds what rows and tokens cost, see
            `flow.working.costs`.
    """

    workers: int
    rows: int
    busy_s: float
    costs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Summary:
    """A finished run, as `summary.json` holds it.

    Attributes:
        name: of the run. seed: of the run.
        eval_before, eval_after: share of held-out responses that were right; None without any.
        steps: completed.
        wall_s: from the first admitted prompt to the last update, seconds.
        total_s: of the whole run, processes started and ended, seconds. Of a resumed run both add
            up its lives, each up to the checkpoint from which the next went on.
        tokens_per_s: trained tokens, prompts included, over `wall_s`.
        max_staleness_allowed, max_staleness_trained, mean_staleness_trained: in versions.
        max_staleness_updates: in optimizer updates.
        rows_put, rows_trained: training rows. rows_evaluated: held-out rows.
        rows_dropped_by_reason: cause to rows.
        rows_masked: counted for a step without being trained, being too old.
        rows_by_staleness: versions to trained rows.
        eval_scores: version to share of held-out responses that were right.
        tokens_generated: response tokens, of all replicas. tokens_trained, tokens_evaluated: of
            those, in trained and in held-out rows.
        tokens_wasted_by_reason: cause to response tokens that were generated for nothing.
        reward_errors: rows, held-out ones included, whose verifier raised or never returned.
        restarts: process to how often it was started again.
        busy_rollout, busy_trainer: share of `wall_s` the engines worked, mean over replicas.
        work: task to what its workers did.
    """

    name: str
    seed: int
    eval_before: float | None
    eval_after: float | None
    steps: int
    wall_s: float
    total_s: float
    tokens_per_s: float
    max_staleness_allowed: int
    max_staleness_trained: int
    mean_staleness_trained: float
    max_staleness_updates: int
    rows_put: int
    rows_trained: int
    rows_evaluated: int
    reward_errors: int
    busy_rollout: float
    busy_trainer: float
    rows_dropped_by_reason: dict[str, int] = field(default_factory=dict)
    rows_masked: int = 0
    rows_by_staleness: dict[str, int] = field(default_factory=dict)
    eval_scores: dict[str, float] = field(default_factory=dict)
    tokens_generated: int = 0
    tokens_trained: int = 0
    tokens_evaluated: int = 0
    tokens_wasted_by_reason: dict[str, int] = field(default_factory=dict)
    restarts: dict[str, int] = field(default_factory=dict)
    work: dict[str, TaskWork] = field(default_factory=dict)
