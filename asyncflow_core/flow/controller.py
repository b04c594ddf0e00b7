"""One run: starts the processes, admits prompts, keeps versions, starts weight updates, watches.

It is not on the data path: rows go between the store and the services.
"""

from __future__ import annotations

import asyncio
import secrets
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from asyncflow_core import metrics
from asyncflow_core.errors import PeerLostError, ServiceTimeoutError
from asyncflow_core.flow.control import RolloutControl, StageControl, StepReport, TrainerControl
from asyncflow_core.flow.host import CONTROLS
from asyncflow_core.flow.launch import Launcher, RunningProcess
from asyncflow_core.flow.plan import Plan
from asyncflow_core.flow.record import Recorder, Rewards, RunFolder
from asyncflow_core.flow.results import StepResult, Summary
from asyncflow_core.flow.specs import in_processes, process_specs
from asyncflow_core.flow.stages import make_stage
from asyncflow_core.flow.supply import Supply
from asyncflow_core.flow.switching import Switching
from asyncflow_core.flow.work import observer_work, stage_work
from asyncflow_core.flow.worker import Worker, first_failure
from asyncflow_core.metrics import Means
from asyncflow_core.parts import PartContext, StageContract, Tokenizer
from asyncflow_core.services.data_store import DataStore
from asyncflow_core.wire import Server, serve_service

__all__ = ["Controller"]

_DEATH_GRACE_S = 1.0
"""A broken connection may be seen before the end of its process, which is awaited so long."""

_RECORD_ROWS = 512


class _FinishedError(Exception):
    """Ends the task group of a run that came to its end."""


@dataclass(slots=True)
class _Totals:
    """Over all steps of a run."""

    rows: int = 0
    tokens: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0
    staleness_updates_max: int = 0
    trainer_busy_s: float = 0.0
    rollout_busy_s: float = 0.0
    wall_s: float = 0.0
    reward_errors: int = 0
    scores: list[float | None] = field(default_factory=list)


class Controller:
    """One run of a plan, once."""

    def __init__(self, plan: Plan, folder: RunFolder) -> None:
        """Keep the arguments; `run` does everything."""
        self._plan = plan
        self._config = plan.config
        self._folder = folder
        self._processes: dict[str, RunningProcess] = {}
        self._roles: dict[str, str] = {}
        self._totals = _Totals()
        self._summary: Summary | None = None

    async def run(self, on_step: Callable[[StepResult], None]) -> Summary:
        """Run to the end; every process is gone when this returns or raises.

        Args:
            on_step: called after every step, on the event loop.

        Raises:
            PeerLostError: a process died; its name, status and last log lines.
            AsyncFlowError: whatever else went wrong.
        """
        start = time.perf_counter()
        async with AsyncExitStack() as stack:
            stack.callback(self._folder.close)
            store, tokenizer = await self._open(stack)
            try:
                async with asyncio.TaskGroup() as group:
                    await self._main(group, stack, store, tokenizer, on_step)
            except* _FinishedError:
                pass
            except* Exception as failures:  # noqa: BLE001 - raised again, explained
                raise await self._explained(first_failure(failures)) from None
        assert self._summary is not None
        summary = replace(self._summary, total_s=time.perf_counter() - start)
        self._folder.write_json("summary.json", asdict(summary))
        return summary

    async def _open(self, stack: AsyncExitStack) -> tuple[DataStore, Tokenizer]:
        """Start everything that must be there before the first row."""
        launcher: Launcher = self._build("launcher")
        await stack.enter_async_context(launcher)
        store: DataStore = await stack.enter_async_context(self._build("data_store"))
        token = secrets.token_hex(16)
        server = Server(f"ipc://{launcher.run_dir}/store.sock", name="controller", token=token)
        serve_service(server, "store", store, DataStore)
        await stack.enter_async_context(server)
        # Processes end before the store they work on; closing a launcher twice is harmless.
        stack.push_async_callback(launcher.aclose)
        for spec in process_specs(
            self._plan,
            run_dir=launcher.run_dir,
            store=server.address,
            token=token,
            log_dir=self._folder.path / "logs",
        ):
            self._processes[spec.name] = await launcher.start(spec, store)
            self._roles[spec.name] = spec.role.role
        tokenizer: Tokenizer = await asyncio.to_thread(self._build, "tokenizer")
        await _all(process.ready() for process in self._processes.values())
        return store, tokenizer

    async def _main(
        self,
        group: asyncio.TaskGroup,
        stack: AsyncExitStack,
        store: DataStore,
        tokenizer: Tokenizer,
        on_step: Callable[[StepResult], None],
    ) -> None:
        for process in self._processes.values():
            group.create_task(_raise_its_end(process))
        recorder = Recorder(self._folder, tokenizer)
        prompts = await asyncio.to_thread(self._build, "prompts", tokenizer)
        controls = {
            name: process.control(CONTROLS[self._roles[name]])
            for name, process in self._processes.items()
        }
        trainer = next(c for c in controls.values() if isinstance(c, TrainerControl))
        replicas = {n: c for n, c in controls.items() if isinstance(c, RolloutControl)}
        # Every task is registered before the first row, or it would not see it.
        workers = [
            *self._stage_workers(stack, store, tokenizer),
            self._record_worker(store, recorder),
        ]
        for worker in workers:
            await worker.register()
        for control in controls.values():
            if isinstance(control, StageControl):
                await control.start()
        for worker in workers:
            group.create_task(worker.run())
        switching = Switching(replicas, trainer, self._plan.switch_mode, group)
        switching.start()
        switching.published(await trainer.publish(0, 0))
        await switching.settled()
        supply = Supply(store, prompts, self._config)
        await self._evaluate(supply, recorder, 0)
        await self._train(group, supply, recorder, switching, trainer, replicas, on_step)
        await switching.settled()
        await self._evaluate(supply, recorder, 1)
        await trainer.save_model(str(self._folder.path / "model"))
        self._summary = await self._summarise(store, supply)
        raise _FinishedError

    async def _train(
        self,
        group: asyncio.TaskGroup,
        supply: Supply,
        recorder: Recorder,
        switching: Switching,
        trainer: TrainerControl,
        replicas: Mapping[str, RolloutControl],
        on_step: Callable[[StepResult], None],
    ) -> None:
        start = step_start = time.perf_counter()
        busy_before = await _busy_s(replicas)
        group.create_task(supply.run())
        for version in range(self._config.workflow.steps):
            report = await trainer.step(version)
            published_at = time.perf_counter()
            weights = await trainer.publish(report.version, 0)
            switching.published(weights)
            supply.advance(report.version)
            rewards = await recorder.wait_batch(version, report.rows)
            now = time.perf_counter()
            record = {
                **self._count(report, rewards),
                metrics.STEP_WALL_S: now - step_start,
                metrics.TOKENS_PER_S: report.tokens / (now - step_start),
                metrics.WEIGHTS_PUBLISH_S: now - published_at,
                metrics.WEIGHTS_STAGE_S: switching.stage_s,
                metrics.WEIGHTS_BYTES: float(weights.manifest.nbytes),
            }
            step_start = now
            self._folder.append("metrics.jsonl", [{"version": report.version, **record}])
            on_step(StepResult(report.version, self._config.workflow.steps, record))
        self._totals.wall_s = time.perf_counter() - start
        self._totals.rollout_busy_s = (await _busy_s(replicas) - busy_before) / len(replicas)

    def _count(self, report: StepReport, rewards: Rewards) -> dict[str, float]:
        """Add a step to the totals; its metrics."""
        totals = self._totals
        totals.rows += report.rows
        totals.tokens += report.tokens
        totals.staleness_sum += report.staleness_sum
        totals.staleness_max = max(totals.staleness_max, report.staleness_max)
        totals.staleness_updates_max = max(
            totals.staleness_updates_max, report.staleness_updates_max
        )
        totals.trainer_busy_s += report.busy_s
        totals.reward_errors += rewards.errors
        means = Means()
        means.add(report.metrics)
        return {
            metrics.REWARD_MEAN: statistics.fmean(rewards.values),
            metrics.REWARD_STD: statistics.pstdev(rewards.values),
            metrics.REWARD_ERRORS: float(rewards.errors),
            metrics.RESPONSE_TOKENS_MEAN: rewards.tokens / len(rewards.values),
            metrics.STALENESS_MEAN: report.staleness_sum / report.rows,
            metrics.STALENESS_MAX: float(report.staleness_max),
            metrics.STALENESS_UPDATES_MAX: float(report.staleness_updates_max),
            metrics.TRAINER_WAIT_S: report.wait_s,
            metrics.TRAINER_BUSY_S: report.busy_s,
            metrics.TRAINER_TOKENS: float(report.tokens),
            **means.means(),
        }

    async def _evaluate(self, supply: Supply, recorder: Recorder, epoch: int) -> None:
        """Answer the held-out prompts with the weights that serve; nothing else is running."""
        rows = await supply.evaluate(epoch)
        evaluation = self._config.evaluation
        if not rows or evaluation is None:
            self._totals.scores.append(None)
            return
        found = await recorder.wait_evaluation(epoch, rows)
        score = sum(value >= evaluation.success for value in found.values) / rows
        self._totals.scores.append(score)

    async def _summarise(self, store: DataStore, supply: Supply) -> Summary:
        totals, flow = self._totals, self._config.workflow
        stats = await store.stats()
        before, after = totals.scores
        return Summary(
            name=self._config.name,
            seed=self._config.seed,
            eval_before=before,
            eval_after=after,
            steps=flow.steps,
            wall_s=totals.wall_s,
            total_s=0.0,
            tokens_per_s=totals.tokens / totals.wall_s,
            max_staleness_allowed=flow.bound,
            max_staleness_trained=totals.staleness_max,
            mean_staleness_trained=totals.staleness_sum / totals.rows,
            max_staleness_updates=totals.staleness_updates_max,
            rows_put=supply.rows_put,
            rows_trained=totals.rows,
            rows_evaluated=supply.rows_evaluated,
            reward_errors=totals.reward_errors,
            busy_rollout=totals.rollout_busy_s / totals.wall_s,
            busy_trainer=totals.trainer_busy_s / totals.wall_s,
            rows_dropped_by_reason=dict(stats.rows_dropped),
        )

    def _stage_workers(
        self, stack: AsyncExitStack, store: DataStore, tokenizer: Tokenizer
    ) -> list[Worker]:
        """Workers on threads of this process, for stages by plugin and by a Python function."""
        workers = []
        for name, stage in self._config.stages.items():
            if in_processes(stage):
                continue
            for number in range(stage.workers):
                worker_name = f"{name}-{number}"
                executor = ThreadPoolExecutor(1, thread_name_prefix=worker_name)
                stack.callback(executor.shutdown, wait=False, cancel_futures=True)
                workers.append(self._stage_worker(store, tokenizer, name, worker_name, executor))
        return workers

    def _stage_worker(
        self,
        store: DataStore,
        tokenizer: Tokenizer,
        name: str,
        worker_name: str,
        executor: ThreadPoolExecutor,
    ) -> Worker:
        stage, task = self._config.stages[name], self._plan.tasks[name]
        chosen = self._plan.chosen.get(f"stages.{name}")
        made = make_stage(
            stage,
            chosen.plugin if chosen else None,
            chosen.options if chosen else None,
            self._context(worker_name, tokenizer),
        )
        contract = StageContract(task.reads, task.writes, task.whole_groups, task.partitions)
        return Worker(
            store,
            task,
            stage_work(made, contract, worker_name, executor),
            requester=worker_name,
            rows_in_flight=2 * stage.rows,
            rows_per_lease=stage.rows,
        )

    def _record_worker(self, store: DataStore, recorder: Recorder) -> Worker:
        return Worker(
            store,
            self._plan.tasks["record"],
            observer_work(recorder.observe),
            requester="recorder",
            rows_in_flight=_RECORD_ROWS,
        )

    def _build(self, section: str, tokenizer: Tokenizer | None = None) -> Any:
        chosen = self._plan.chosen[section]
        return chosen.plugin.factory(chosen.options, self._context(section, tokenizer))

    def _context(self, name: str, tokenizer: Tokenizer | None) -> PartContext:
        return PartContext(
            name=name,
            seed=self._config.seed,
            tokenizer=tokenizer,
            registry=self._plan.registry,
        )

    async def _explained(self, failure: BaseException) -> BaseException:
        """The end of a process instead of the broken calls that followed from it."""
        if not isinstance(failure, PeerLostError | ServiceTimeoutError | OSError):
            return failure
        watching = {asyncio.create_task(p.ended()): n for n, p in self._processes.items()}
        done, _ = await asyncio.wait(watching, timeout=_DEATH_GRACE_S) if watching else ((), ())
        for task in watching:
            task.cancel()
        for task in done:
            if not task.cancelled() and task.exception() is None:
                return PeerLostError(task.result(), service=watching[task])
        return failure


async def _raise_its_end(process: RunningProcess) -> None:
    raise PeerLostError(await process.ended(), service=process.name)


async def _all(calls: Any) -> None:
    """Await all side by side; the first failure ends the rest."""
    try:
        async with asyncio.TaskGroup() as group:
            for call in calls:
                group.create_task(call)
    except* Exception as failures:  # noqa: BLE001 - raised again, alone
        raise first_failure(failures) from None


async def _busy_s(replicas: Mapping[str, RolloutControl]) -> float:
    return sum([(await control.stats()).busy_s for control in replicas.values()])
