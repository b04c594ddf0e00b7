"""Answering held-out prompts at published versions: before, after, and beside training.

Held-out rows are outside batches: they pass through the same rollout and rewards as training rows,
and no trainer sees them. Beside training only so many are in the store at a time as `share` allows,
and replicas take those first; so an evaluation comes forward, and never takes more than its share.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence

from asyncflow_core import metrics
from asyncflow_core.config import EvaluationConfig, RunConfig
from asyncflow_core.flow.running.record import Recorder, Rewards
from asyncflow_core.flow.running.supply import Supply
from asyncflow_core.flow.running.totals import Totals
from asyncflow_core.flow.weights.switching import Switching
from asyncflow_core.parts import PromptRecord
from asyncflow_core.services.data_store import NO_DROPS, DataStore

__all__ = ["Evaluations", "rows_at_a_time"]

_log = logging.getLogger(__name__)

_LOOK_S = 0.25
"""Rows that are dropped are announced to nobody one by one: the store is asked so often."""


def rows_at_a_time(config: RunConfig, evaluation: EvaluationConfig) -> int:
    """Held-out rows that may be in the store beside training; at least one prompt's."""
    flight = config.rollout.replicas * config.rollout.rows_in_flight
    return max(evaluation.samples, math.floor(evaluation.share * flight))


class Evaluations:
    """The evaluations of a run, one at a time.

    Concurrency: the one beside training is a task of its own, which nothing waits for before the
    end of training.
    """

    def __init__(
        self,
        config: RunConfig,
        store: DataStore,
        supply: Supply,
        recorder: Recorder,
        switching: Switching,
        totals: Totals,
        write: Callable[[dict[str, float]], None],
    ) -> None:
        """Take what is connected.

        Args:
            config: of the run.
            store: where rows pass through.
            supply: puts the prompts.
            recorder: sees the rewards.
            switching: knows when replicas serve a version.
            totals: keeps the scores.
            write: takes the record of each evaluation.
        """
        self._config = config
        self._evaluation = config.evaluation
        self._store = store
        self._supply = supply
        self._recorder = recorder
        self._switching = switching
        self._totals = totals
        self._write = write
        self._prompts: list[PromptRecord] | None = None
        self._beside: asyncio.Task[None] | None = None
        self._news: dict[str, float] = {}
        self.skipped = 0
        """Evaluations that were due while one was still going on."""

    async def alone(self, version: int) -> None:
        """Answer all prompts with the weights that serve; nothing else is running."""
        if self._beside is not None:
            await self._beside
        await self._evaluate(version, at_a_time=None)

    def begin(self, version: int, group: asyncio.TaskGroup) -> None:
        """A version was published: evaluate it beside training, if it is one of those."""
        evaluation = self._evaluation
        if evaluation is None or not evaluation.every or version % evaluation.every:
            return
        if version >= self._config.workflow.steps:
            return  # the evaluation after training is of this version
        if self._beside is not None and not self._beside.done():
            self.skipped += 1
            _log.warning(
                "version %d is not evaluated: the evaluation before it is still going on; raise "
                "evaluation.every or evaluation.share, or lower evaluation.limit",
                version,
            )
            return
        self._beside = group.create_task(self._in_its_share(version, evaluation))

    def news(self) -> dict[str, float]:
        """Metrics of the evaluation that ended since the last call; empty when none did."""
        found, self._news = self._news, {}
        return found

    async def _in_its_share(self, version: int, evaluation: EvaluationConfig) -> None:
        # From here on no replica begins a response with older weights.
        await self._switching.settled()
        await self._evaluate(version, at_a_time=rows_at_a_time(self._config, evaluation))

    async def _evaluate(self, version: int, *, at_a_time: int | None) -> None:
        evaluation, start = self._evaluation, time.perf_counter()
        if evaluation is None:
            return
        if self._prompts is None:
            self._prompts = await self._supply.held_out()
        prompts, samples = self._prompts, evaluation.samples
        if not prompts:
            return
        put = 0
        while put < len(prompts):
            groups = len(prompts) - put
            if at_a_time is not None:
                groups = min(groups, (at_a_time - await self._living()) // samples)
            if groups > 0:
                chosen = prompts[put : put + groups]
                await self._supply.evaluate(version, chosen, samples, first=put)
                put += groups
            else:
                await self._recorder.changed(_LOOK_S)
        while await self._living():
            await self._recorder.changed(_LOOK_S)
        rewards = self._recorder.take_evaluation(version)
        wall_s = time.perf_counter() - start
        self._count(version, rewards, put * samples, evaluation.success, wall_s)

    async def _living(self) -> int:
        """Held-out rows that are not rewarded yet."""
        return (await self._store.stats(drops_after=NO_DROPS)).rows_by_partition.get("eval", 0)

    def _count(
        self, version: int, rewards: Rewards, rows: int, success: float, wall_s: float
    ) -> None:
        answered = len(rewards.values)
        if answered < rows:
            _log.warning(
                "the evaluation of version %d is over %d of %d rows: the others were dropped",
                *(version, answered, rows),
            )
        if rewards.errors:
            _log.warning(
                "%d rewards of the evaluation of version %d failed and count 0, the first: %s",
                *(rewards.errors, version, rewards.first_error),
            )
        self._totals.reward_errors += rewards.errors
        self._totals.tokens_evaluated += rewards.tokens
        record = {
            metrics.EVAL_VERSION: float(version),
            metrics.EVAL_ROWS: float(answered),
            metrics.EVAL_ROWS_DROPPED: float(rows - answered),
            metrics.EVAL_WALL_S: wall_s,
        }
        if answered and not rewards.failed:  # a score of what nobody judged would be none
            score = _share(rewards.values, success)
            self._totals.scores[version] = score
            record |= {
                metrics.EVAL_SCORE: score,
                metrics.EVAL_REWARD_MEAN: sum(rewards.values) / answered,
                metrics.EVAL_OLDEST_VERSION: float(rewards.oldest or 0),
                metrics.EVAL_NEWEST_VERSION: float(rewards.newest or 0),
            }
        self._news = record
        self._write(record)


def _share(values: Sequence[float], success: float) -> float:
    return sum(value >= success for value in values) / len(values)
