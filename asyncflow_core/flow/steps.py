"""The steps of a run: train, publish, count, evaluate; what the controller does between them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from asyncflow_core import metrics
from asyncflow_core.flow.control import RolloutControl, StepReport, TrainerControl
from asyncflow_core.flow.plan import Plan
from asyncflow_core.flow.record import Recorder, RunFolder
from asyncflow_core.flow.results import StepResult
from asyncflow_core.flow.supply import Supply
from asyncflow_core.flow.switching import Switching
from asyncflow_core.flow.totals import Totals
from asyncflow_core.flow.waits import Waits
from asyncflow_core.parts import Tokenizer
from asyncflow_core.services.data_store import DataStore
from asyncflow_core.services.weight_sync import PublishedWeights

__all__ = ["Parts", "Steps"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """What is there once every process answers."""

    store: DataStore
    tokenizer: Tokenizer
    recorder: Recorder
    supply: Supply
    trainer: TrainerControl
    replicas: Mapping[str, RolloutControl]
    switching: Switching
    waits: Waits


class Steps:
    """From the first weights to the saved model."""

    def __init__(
        self,
        plan: Plan,
        folder: RunFolder,
        parts: Parts,
        totals: Totals,
        on_step: Callable[[StepResult], None],
    ) -> None:
        """Take what is connected; `run` does everything."""
        self._config = plan.config
        self._overlaps_export = plan.overlaps_export
        self._folder = folder
        self._parts = parts
        self._totals = totals
        self._on_step = on_step
        self._started = self._step_ended = 0.0

    async def run(self, group: asyncio.TaskGroup) -> None:
        """Publish the first weights, evaluate, train all steps, evaluate, save the model."""
        parts, switching = self._parts, self._parts.switching
        parts.waits.begin("bringing the first weights to all replicas", switching.waiting)
        switching.published(await parts.trainer.publish(0, 0))
        await switching.settled()
        await self._evaluate(0)
        await self._train(group)
        parts.waits.begin("bringing the last weights to all replicas", switching.waiting)
        await switching.settled()
        await self._evaluate(1)
        parts.waits.begin("saving the model")
        await parts.trainer.save_model(str(self._folder.path / "model"))
        self._totals.rows_put = parts.supply.rows_put
        self._totals.rows_evaluated = parts.supply.rows_evaluated

    async def _train(self, group: asyncio.TaskGroup) -> None:
        """All steps; what is counted and written of one is beside the next."""
        parts, steps = self._parts, self._config.workflow.steps
        self._started = self._step_ended = time.perf_counter()
        busy_before = await _busy_s(parts.replicas)
        group.create_task(parts.supply.admit())
        parts.waits.begin("step 1", parts.switching.waiting)
        stepping = group.create_task(parts.trainer.step(0))
        for version in range(1, steps + 1):
            report = await stepping
            parts.supply.advance(version)  # its puts go beside the export
            publishing = group.create_task(self._publish(version))
            if version < steps:
                parts.waits.begin(f"step {version + 1}", parts.switching.waiting)
                if self._overlaps_export:
                    await asyncio.sleep(0)  # the export is called before the step that may go on
                else:
                    await publishing
                stepping = group.create_task(parts.trainer.step(version))
            await self._record(report, publishing)
        self._totals.wall_s = time.perf_counter() - self._started
        busy_s = await _busy_s(parts.replicas) - busy_before
        self._totals.rollout_busy_s = busy_s / len(parts.replicas)

    async def _publish(self, version: int) -> tuple[PublishedWeights, float]:
        """Bring a version on its way to the replicas; what was published, and the seconds."""
        start = time.perf_counter()
        weights = await self._parts.trainer.publish(version, 0)
        self._parts.switching.published(weights)
        return weights, time.perf_counter() - start

    async def _record(
        self, report: StepReport, publishing: asyncio.Task[tuple[PublishedWeights, float]]
    ) -> None:
        parts, switching = self._parts, self._parts.switching
        now = time.perf_counter()
        wall_s, self._step_ended = now - self._step_ended, now
        rewards = await parts.recorder.wait_batch(report.version - 1, report.rows)
        if rewards.errors and not self._totals.reward_errors:
            _log.warning("a reward failed and counts 0: %s", rewards.last_error)
        weights, publish_s = await publishing
        record = {
            **self._totals.add(report, rewards),
            metrics.STEP_WALL_S: wall_s,
            metrics.TOKENS_PER_S: report.tokens / wall_s,
            metrics.WEIGHTS_PUBLISH_S: publish_s,
            metrics.WEIGHTS_STAGE_S: switching.stage_s,
            metrics.WEIGHTS_COMMIT_S: switching.commit_s,
            metrics.WEIGHTS_FAILURES: float(switching.failures),
            metrics.WEIGHTS_COMPARED: float(switching.compared),
            **await _switched_tokens(parts.replicas),
            metrics.WEIGHTS_BYTES: float(weights.manifest.nbytes),
        }
        self._folder.append("metrics.jsonl", [{"version": report.version, **record}])
        steps = self._config.workflow.steps
        self._on_step(StepResult(report.version, steps, record))

    async def _evaluate(self, epoch: int) -> None:
        """Answer the held-out prompts with the weights that serve; nothing else is running."""
        parts = self._parts
        parts.waits.begin("the evaluation")
        rows = await parts.supply.evaluate(epoch)
        evaluation = self._config.evaluation
        if not rows or evaluation is None:
            self._totals.scores.append(None)
            return
        found = await parts.recorder.wait_evaluation(epoch, rows)
        score = sum(value >= evaluation.success for value in found.values) / rows
        self._totals.scores.append(score)


async def _switched_tokens(replicas: Mapping[str, RolloutControl]) -> dict[str, float]:
    stats = [await control.stats() for control in replicas.values()]
    return {
        metrics.ROLLOUT_TOKENS_KEPT: float(sum(found.tokens_kept for found in stats)),
        metrics.ROLLOUT_TOKENS_LOST: float(sum(found.tokens_lost for found in stats)),
    }


async def _busy_s(replicas: Mapping[str, RolloutControl]) -> float:
    return sum([(await control.stats()).busy_s for control in replicas.values()])
