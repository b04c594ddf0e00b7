"""Counting a run: a step's metrics, and the summary over all steps. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field

from asyncflow_core import metrics
from asyncflow_core.config import RunConfig
from asyncflow_core.flow.processes.control import StepReport
from asyncflow_core.flow.running.policies.ready_first import TOO_STALE
from asyncflow_core.flow.running.record import Rewards
from asyncflow_core.flow.running.results import Summary
from asyncflow_core.flow.running.status import Staleness, Tokens
from asyncflow_core.metrics import Means

__all__ = ["Totals"]


@dataclass(slots=True)
class Totals:
    """Over all steps of a run.

    Attributes:
        first_version: completed before this life of the run.
        wall_s: of all steps. total_s: of the whole run. Both are of all lives, of each up to where
            the next one went on from.
        rollout_busy_s: of the engines meanwhile, mean over replicas.
        rows_put, rows_evaluated: training rows and held-out rows that were put.
        tokens_generated, tokens_kept, tokens_lost: response tokens, of all replicas and lives, as
            far as they were asked; kept and lost by switches of weights.
        response_tokens: trained. tokens_evaluated: of held-out rows.
        wasted: cause to response tokens that were generated and then thrown away, what switches
            of weights lost not included: engines count that.
        staleness: of the trained rows.
        scores: version to share of held-out responses that were right.
        rows_masked: counted for a step without being trained.
        rows_dropped: cause to rows, in earlier lives of the run, where the store forgot them.
        begun: whether training began. last: metrics of the last step.
    """

    first_version: int = 0
    steps: int = 0
    rows: int = 0
    tokens: int = 0
    tokens_generated: int = 0
    tokens_kept: int = 0
    tokens_lost: int = 0
    response_tokens: int = 0
    tokens_evaluated: int = 0
    wasted: Counter[str] = field(default_factory=Counter)
    staleness: Staleness = field(default_factory=Staleness)
    staleness_sum: int = 0
    staleness_max: int = 0
    staleness_updates_max: int = 0
    trainer_busy_s: float = 0.0
    reward_errors: int = 0
    wall_s: float = 0.0
    total_s: float = 0.0
    rollout_busy_s: float = 0.0
    rows_put: int = 0
    rows_evaluated: int = 0
    scores: dict[int, float] = field(default_factory=dict)
    rows_masked: int = 0
    rows_dropped: Counter[str] = field(default_factory=Counter)
    begun: bool = False
    last: dict[str, float] = field(default_factory=dict)

    def add(self, report: StepReport, rewards: Rewards) -> dict[str, float]:
        """Add a step; returns its metrics."""
        self.steps = report.version
        self.rows += report.rows
        self.tokens += report.tokens
        masked = report.tokens_too_stale if report.rows_masked else 0
        self.response_tokens += rewards.tokens - masked
        self.staleness.add(report.version, report.staleness_rows)
        self.rows_masked += report.rows_masked
        if report.tokens_too_stale:
            self.wasted[TOO_STALE] += report.tokens_too_stale
        self.staleness_sum += report.staleness_sum
        self.staleness_max = max(self.staleness_max, report.staleness_max)
        self.staleness_updates_max = max(self.staleness_updates_max, report.staleness_updates_max)
        self.trainer_busy_s += report.busy_s
        self.reward_errors += rewards.errors
        means = Means()
        means.add(report.metrics)
        return {
            metrics.REWARD_MEAN: statistics.fmean(rewards.values),
            metrics.REWARD_STD: statistics.pstdev(rewards.values),
            metrics.REWARD_ERRORS: float(rewards.errors),
            metrics.RESPONSE_TOKENS_MEAN: rewards.tokens / len(rewards.values),
            # Of a step whose rows were all too old, and masked, none is trained.
            metrics.STALENESS_MEAN: report.staleness_sum / max(1, report.rows),
            metrics.STALENESS_MAX: float(report.staleness_max),
            metrics.STALENESS_UPDATES_MAX: float(report.staleness_updates_max),
            metrics.TRAINER_WAIT_S: report.wait_s,
            metrics.TRAINER_BUSY_S: report.busy_s,
            metrics.TRAINER_TOKENS: float(report.tokens),
            **means.means(),
        }

    def summary(self, config: RunConfig, rows_dropped: dict[str, int], tokens: Tokens) -> Summary:
        """The finished run."""
        return Summary(
            name=config.name,
            seed=config.seed,
            eval_before=self.scores.get(self.first_version),
            eval_after=self.scores.get(self.steps),
            eval_scores={str(version): score for version, score in self.scores.items()},
            steps=self.steps,
            wall_s=self.wall_s,
            total_s=self.total_s,
            tokens_per_s=self.tokens / self.wall_s,
            max_staleness_allowed=config.workflow.bound,
            max_staleness_trained=self.staleness_max,
            mean_staleness_trained=self.staleness_sum / max(1, self.rows),
            max_staleness_updates=self.staleness_updates_max,
            rows_put=self.rows_put,
            rows_trained=self.rows,
            rows_evaluated=self.rows_evaluated,
            reward_errors=self.reward_errors,
            busy_rollout=self.rollout_busy_s / self.wall_s,
            busy_trainer=self.trainer_busy_s / self.wall_s,
            rows_dropped_by_reason=rows_dropped,
            rows_masked=self.rows_masked,
            rows_by_staleness={str(n): rows for n, rows in sorted(self.staleness.rows.items())},
            tokens_generated=tokens.generated,
            tokens_trained=tokens.trained,
            tokens_evaluated=tokens.evaluated,
            tokens_wasted_by_reason=dict(tokens.wasted),
        )
