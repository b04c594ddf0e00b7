"""The steps of a run: train, publish, count, evaluate; what the controller does between them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from asyncflow_core import metrics
from asyncflow_core.errors import ServiceError
from asyncflow_core.flow.planning.plan import Plan
from asyncflow_core.flow.processes.control import StepReport, TrainerControl
from asyncflow_core.flow.processes.replicas import Replicas
from asyncflow_core.flow.processes.waits import Waits
from asyncflow_core.flow.processes.watchdog import Restarts
from asyncflow_core.flow.running.evaluation import Evaluations
from asyncflow_core.flow.running.folder import RunFolder
from asyncflow_core.flow.running.policies.over_sampling import STRAGGLER
from asyncflow_core.flow.running.record import Recorder, Rewards
from asyncflow_core.flow.running.results import StepResult
from asyncflow_core.flow.running.saving import Saving
from asyncflow_core.flow.running.supply import Supply
from asyncflow_core.flow.running.totals import Totals
from asyncflow_core.flow.weights.switching import Switching
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
    replicas: Replicas
    switching: Switching
    waits: Waits
    restarts: Restarts


class Steps:
    """From the first weights to the saved model."""

    def __init__(
        self,
        plan: Plan,
        folder: RunFolder,
        parts: Parts,
        totals: Totals,
        on_step: Callable[[StepResult], None],
        began: float,
    ) -> None:
        """Take what is connected; `run` does everything. `began`: the run, by the clock here."""
        self._plan, self._config = plan, plan.config
        self._overlaps_export, self._overlaps_fetch = plan.overlaps_export, plan.overlaps_fetch
        self._folder = folder
        self._parts = parts
        self._totals = totals
        self._on_step = on_step
        self._began = began
        self._life, self._first = folder.start.life, folder.start.version
        self._saving = Saving(plan.config, folder, parts.trainer, parts.supply, parts.store, totals)
        self._evaluations = Evaluations(
            plan.config,
            parts.store,
            parts.supply,
            parts.recorder,
            parts.switching,
            totals,
            lambda record: folder.append("evaluations.jsonl", [record]),
        )
        self._started = self._step_ended = self._busy_before = 0.0
        self._said_errors = False

    async def run(self, group: asyncio.TaskGroup) -> None:
        """Publish the first weights, evaluate, train all steps, evaluate, save the model."""
        parts, switching = self._parts, self._parts.switching
        parts.waits.begin("bringing the first weights to all replicas", switching.waiting)
        await self._saving.load()
        await switching.publish(self._first, self._life)
        await switching.settled()
        if not self._life:
            parts.waits.begin("the evaluation before training", self._waiting)
            await self._evaluations.alone(0)
        elif self._first not in self._totals.scores:
            self._evaluations.begin(self._first, group)
        await self._train(group)
        parts.waits.begin("bringing the last weights to all replicas", switching.waiting)
        await switching.settled()
        parts.waits.begin("the evaluation after training", self._waiting)
        await self._evaluations.alone(self._config.workflow.steps)
        parts.waits.begin("saving the model")
        await parts.trainer.save_model(str(self._folder.path / "model"))
        self._totals.rows_put = parts.supply.rows_put
        self._totals.rows_evaluated += parts.supply.rows_evaluated

    async def _train(self, group: asyncio.TaskGroup) -> None:
        """All steps; what is counted and written of one is beside the next."""
        parts, first, steps = self._parts, self._first, self._config.workflow.steps
        self._step_ended = time.perf_counter()
        self._started = self._step_ended - self._totals.wall_s
        self._totals.begun = True
        self._busy_before = (await parts.replicas.totals()).busy_s
        group.create_task(parts.supply.run())
        step = min(first + 1, steps)
        parts.waits.begin(f"step {step}", self._waiting, step=step)
        began = time.perf_counter()
        if first < steps:
            stepping = group.create_task(parts.trainer.step(first))
        for version in range(first + 1, steps + 1):
            report, report_began = await stepping, began
            late = parts.supply.advance(version, report.group_keys)  # puts go beside the export
            publishing = group.create_task(self._publish(version, group))
            saved_s = 0.0
            if self._saving.due(version):
                await publishing
                saved_s = await self._saving.begin(version)
            if version < steps:
                step = version + 1
                parts.waits.begin(f"step {step}", self._waiting, step=step)
                if self._overlaps_export:
                    await asyncio.sleep(0)  # the export is called before the step that may go on
                else:
                    await publishing
                stepping = group.create_task(parts.trainer.step(version))
                began = time.perf_counter()
            if late:
                await parts.store.drop(late, reason=STRAGGLER)
                await parts.replicas.abort(late)
            await self._record(report, publishing, saved_s, report_began)
        await self._count_time()

    def _waiting(self) -> list[str]:
        """What the controller's own parts wait for."""
        return [*self._parts.switching.waiting(), *self._parts.supply.source.waiting()]

    async def _count_time(self) -> None:
        """Bring what grows with the time up to now."""
        replicas = self._parts.replicas
        now = time.perf_counter()
        self._totals.wall_s, self._totals.total_s = now - self._started, now - self._began
        busy_s, before = (await replicas.totals()).busy_s, self._busy_before
        self._totals.rollout_busy_s += (busy_s - before) / replicas.count
        self._busy_before = busy_s

    async def _publish(
        self, version: int, group: asyncio.TaskGroup
    ) -> tuple[PublishedWeights, float]:
        """Bring a version on its way to the replicas; what was published, and the seconds."""
        start = time.perf_counter()
        weights = await self._parts.switching.publish(
            version, self._life, overlaps=self._overlaps_fetch
        )
        self._evaluations.begin(version, group)
        return weights, time.perf_counter() - start

    async def _record(
        self,
        report: StepReport,
        publishing: asyncio.Task[tuple[PublishedWeights, float]],
        saved_s: float,
        began: float,
    ) -> None:
        parts, switching = self._parts, self._parts.switching
        now = time.perf_counter()
        wall_s, self._step_ended = now - self._step_ended, now
        rows = report.rows + report.rows_masked
        rewards = await parts.recorder.wait_groups(report.group_keys, rows)
        if rewards.failed:
            raise _nothing_learned(self._plan, report.version, rewards)
        if rewards.errors and not self._said_errors:
            self._said_errors = True
            _log.warning("a reward failed and counts 0: %s", rewards.first_error)
        delay_s = parts.supply.paced(
            slack_s=began - rewards.last_at, waited_s=report.wait_s, step_s=wall_s
        )
        weights, publish_s = await publishing
        rollout = await parts.replicas.totals()
        record = {
            **self._totals.add(report, rewards),
            metrics.STEP_WALL_S: wall_s,
            metrics.TOKENS_PER_S: report.tokens / wall_s,
            metrics.PACING_DELAY_S: delay_s,
            metrics.WEIGHTS_PUBLISH_S: publish_s,
            metrics.WEIGHTS_STAGE_S: switching.stage_s,
            metrics.WEIGHTS_COMMIT_S: switching.commit_s,
            metrics.WEIGHTS_FAILURES: float(switching.failures),
            metrics.WEIGHTS_COMPARED: float(switching.compared),
            metrics.ROLLOUT_TOKENS_KEPT: float(rollout.tokens_kept),
            metrics.ROLLOUT_TOKENS_LOST: float(rollout.tokens_lost),
            metrics.ROLLOUT_TOKENS_DIED: float(self._totals.wasted["died"]),
            metrics.RESTARTS: float(parts.restarts.total),
            metrics.WEIGHTS_BYTES: float(weights.manifest.nbytes),
            metrics.CHECKPOINT_SAVE_S: saved_s,
            **self._evaluations.news(),
        }
        self._totals.last = record
        at = {"version": report.version, "life": self._life}
        self._folder.append("metrics.jsonl", [{**at, **record}])
        if self._saving.due(report.version):
            await self._count_time()
            await self._saving.finish(report.version)
        await self._saving.let_go(report.version)
        steps = self._config.workflow.steps
        self._on_step(StepResult(report.version, steps, record))


def _nothing_learned(plan: Plan, version: int, rewards: Rewards) -> ServiceError:
    """Why a run ends after a step whose rewards all failed: a mean of 0 would look like one."""
    name = next(name for name, task in plan.tasks.items() if "reward_error" in task.spec.writes)
    stage = plan.config.stages[name]
    made_by = stage.plugin or stage.model_dump()["function"]
    return ServiceError(
        f"all {len(rewards.values)} rewards of step {version} failed, so it learned nothing; the "
        f"first of stage {name!r} ({made_by}): {rewards.first_error}; mend it (reward_error in "
        f"samples.jsonl has what each row's said), then start the run again",
        service=name,
    )
