"""One run: starts the processes, admits prompts, keeps versions, starts weight updates, watches.

It is not on the data path: rows go between the store and the services.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from asyncflow_core import metrics
from asyncflow_core.config import PartConfig
from asyncflow_core.errors import PeerLostError, ServiceError
from asyncflow_core.flow.control import RolloutControl, StageControl, TrainerControl
from asyncflow_core.flow.host import CONTROLS
from asyncflow_core.flow.launch import Launcher, RunningProcess
from asyncflow_core.flow.plan import Plan
from asyncflow_core.flow.record import Recorder, RunFolder
from asyncflow_core.flow.results import StepResult, Summary
from asyncflow_core.flow.specs import process_specs
from asyncflow_core.flow.supply import Supply
from asyncflow_core.flow.switching import Switching
from asyncflow_core.flow.threads import DaemonThread
from asyncflow_core.flow.totals import Totals
from asyncflow_core.flow.waits import Waits
from asyncflow_core.flow.worker import first_failure
from asyncflow_core.flow.workers_here import workers_here
from asyncflow_core.parts import PartContext, Tokenizer
from asyncflow_core.services.data_store import DataStore, SupportsAttach
from asyncflow_core.wire import Server, serve_service

__all__ = ["Controller"]

_log = logging.getLogger(__name__)

_DEATH_GRACE_S = 1.0
"""A broken connection may be seen before the end of its process, which is awaited so long."""


class _FinishedError(Exception):
    """Ends the task group of a run that came to its end."""


class _EndedError(PeerLostError):
    """A process of the run ended by itself."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """What is there once every process answers."""

    store: DataStore
    tokenizer: Tokenizer
    recorder: Recorder
    supply: Supply
    trainer: TrainerControl
    replicas: Mapping[str, RolloutControl]
    switching: Switching
    waits: Waits


class Controller:
    """One run of a plan, once."""

    def __init__(
        self, plan: Plan, folder: RunFolder, on_step: Callable[[StepResult], None]
    ) -> None:
        """Keep the arguments; `run` does everything.

        Args:
            plan: what to run.
            folder: where its files go.
            on_step: called after every step, on the event loop.
        """
        self._plan = plan
        self._config = plan.config
        self._folder = folder
        self._on_step = on_step
        self._processes: list[RunningProcess] = []
        self._controls: dict[str, Any] = {}
        self._totals = Totals()

    async def run(self) -> Summary:
        """Run to the end; every process is gone when this returns or raises.

        Raises:
            PeerLostError: a process ended; its name, status and last log lines.
            AsyncFlowError: whatever else went wrong.
        """
        start = time.perf_counter()
        async with AsyncExitStack() as stack:
            stack.callback(self._folder.close)
            launcher: Launcher = await stack.enter_async_context(self._build("launcher"))
            store: DataStore = await stack.enter_async_context(
                self._build("data_store", run_dir=launcher.run_dir)
            )
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._main(group, stack, launcher, store))
            except BaseExceptionGroup as failures:
                await self._raise_why(failures)
            stats = await store.stats()
        summary = self._totals.summary(
            self._config, dict(stats.rows_dropped), time.perf_counter() - start
        )
        self._folder.write_json("summary.json", asdict(summary))
        return summary

    async def _main(
        self,
        group: asyncio.TaskGroup,
        stack: AsyncExitStack,
        launcher: Launcher,
        store: DataStore,
    ) -> None:
        waits = Waits(store)
        group.create_task(waits.run())
        await self._start_processes(group, stack, launcher, store, waits)
        parts = await self._connect(group, stack, store, waits)
        parts.waits.begin("bringing the first weights to all replicas", parts.switching.waiting)
        parts.switching.published(await parts.trainer.publish(0, 0))
        await parts.switching.settled()
        await self._evaluate(parts, 0)
        await self._train(group, parts)
        parts.waits.begin("bringing the last weights to all replicas", parts.switching.waiting)
        await parts.switching.settled()
        await self._evaluate(parts, 1)
        parts.waits.begin("saving the model")
        await parts.trainer.save_model(str(self._folder.path / "model"))
        self._totals.rows_put = parts.supply.rows_put
        self._totals.rows_evaluated = parts.supply.rows_evaluated
        raise _FinishedError

    async def _start_processes(
        self,
        group: asyncio.TaskGroup,
        stack: AsyncExitStack,
        launcher: Launcher,
        store: DataStore,
        waits: Waits,
    ) -> None:
        """Start all and wait until each answers; from here on each one's end ends the run."""
        token = secrets.token_hex(16)
        address, part = "", None
        if isinstance(store, SupportsAttach):
            part = PartConfig(plugin=self._config.data_store.plugin, options=store.attach_options())
        else:
            server = Server(f"ipc://{launcher.run_dir}/store.sock", name="controller", token=token)
            serve_service(server, "store", store, DataStore)
            await stack.enter_async_context(server)
            address = server.address
        # Processes end before the store they work on; closing a launcher twice is harmless.
        stack.push_async_callback(launcher.aclose)
        roles = {}
        for spec in process_specs(
            self._plan,
            run_dir=launcher.run_dir,
            store=address,
            store_part=part,
            token=token,
            log_dir=self._folder.path / "logs",
        ):
            process = await launcher.start(spec, store)
            self._processes.append(process)
            roles[process.name] = spec.role.role
            group.create_task(_raise_its_end(process))
        loading = list(roles)
        waits.begin("the start", lambda: [f"{', '.join(loading)} do not answer yet"])

        async def ready(process: RunningProcess) -> None:
            await process.ready()
            self._controls[process.name] = process.control(CONTROLS[roles[process.name]])
            loading.remove(process.name)

        async with asyncio.TaskGroup() as starting:
            for process in self._processes:
                starting.create_task(ready(process))

    async def _connect(
        self, group: asyncio.TaskGroup, stack: AsyncExitStack, store: DataStore, waits: Waits
    ) -> _Parts:
        """Register every task before the first row, which it would not see; start the workers."""
        waits.begin("making the tokenizer, the prompts and the workers")
        drawing, writing = DaemonThread("prompts"), DaemonThread("recorder")
        for thread in (drawing, writing):
            stack.callback(thread.shutdown, wait=False, cancel_futures=True)
        aside = partial(asyncio.get_running_loop().run_in_executor, drawing)
        tokenizer: Tokenizer = await aside(self._build, "tokenizer")
        prompts = await aside(self._build, "prompts", tokenizer)
        recorder = Recorder(self._folder, tokenizer, writing)
        workers = workers_here(self._plan, store, tokenizer, recorder, stack)
        for worker in workers:
            await worker.register()
        controls = self._controls.values()
        for control in controls:
            if isinstance(control, StageControl):
                await control.start()
        for worker in workers:
            group.create_task(worker.run())
        trainer = next(c for c in controls if isinstance(c, TrainerControl))
        replicas = {n: c for n, c in self._controls.items() if isinstance(c, RolloutControl)}
        switching = Switching(
            replicas, trainer, self._plan.switch_mode, group, self._config.weight_sync
        )
        switching.start()
        supply = Supply(store, prompts, self._config, drawing)
        group.create_task(supply.watch_drops())
        return _Parts(store, tokenizer, recorder, supply, trainer, replicas, switching, waits)

    async def _train(self, group: asyncio.TaskGroup, parts: _Parts) -> None:
        supply, switching, steps = parts.supply, parts.switching, self._config.workflow.steps
        start = step_start = time.perf_counter()
        busy_before = await _busy_s(parts.replicas)
        group.create_task(supply.admit())
        for version in range(steps):
            parts.waits.begin(f"step {version + 1}", switching.waiting)
            report = await parts.trainer.step(version)
            supply.advance(report.version)  # its puts go beside the export
            published_at = time.perf_counter()
            weights = await parts.trainer.publish(report.version, 0)
            switching.published(weights)
            publish_s = time.perf_counter() - published_at
            rewards = await parts.recorder.wait_batch(version, report.rows)
            if rewards.errors and not self._totals.reward_errors:
                _log.warning("a reward failed and counts 0: %s", rewards.last_error)
            now = time.perf_counter()
            record = {
                **self._totals.add(report, rewards),
                metrics.STEP_WALL_S: now - step_start,
                metrics.TOKENS_PER_S: report.tokens / (now - step_start),
                metrics.WEIGHTS_PUBLISH_S: publish_s,
                metrics.WEIGHTS_STAGE_S: switching.stage_s,
                metrics.WEIGHTS_COMMIT_S: switching.commit_s,
                metrics.WEIGHTS_FAILURES: float(switching.failures),
                metrics.WEIGHTS_COMPARED: float(switching.compared),
                **await _switched_tokens(parts.replicas),
                metrics.WEIGHTS_BYTES: float(weights.manifest.nbytes),
            }
            step_start = now
            self._folder.append("metrics.jsonl", [{"version": report.version, **record}])
            self._on_step(StepResult(report.version, steps, record))
        self._totals.wall_s = time.perf_counter() - start
        busy_s = await _busy_s(parts.replicas) - busy_before
        self._totals.rollout_busy_s = busy_s / len(parts.replicas)

    async def _evaluate(self, parts: _Parts, epoch: int) -> None:
        """Answer the held-out prompts with the weights that serve; nothing else is running."""
        parts.waits.begin("the evaluation")
        rows = await parts.supply.evaluate(epoch)
        evaluation = self._config.evaluation
        if not rows or evaluation is None:
            self._totals.scores.append(None)
            return
        found = await parts.recorder.wait_evaluation(epoch, rows)
        score = sum(value >= evaluation.success for value in found.values) / rows
        self._totals.scores.append(score)

    def _build(
        self, section: str, tokenizer: Tokenizer | None = None, run_dir: Path | None = None
    ) -> Any:
        chosen = self._plan.chosen[section]
        context = PartContext(
            name=section,
            seed=self._config.seed,
            run_dir=run_dir,
            tokenizer=tokenizer,
            registry=self._plan.registry,
        )
        return chosen.plugin.factory(chosen.options, context)

    async def _raise_why(self, failures: BaseExceptionGroup[BaseException]) -> None:
        """Raise what ended the run; return if it came to its end."""
        _, rest = failures.split(_FinishedError)
        if rest is None:
            return
        failure = first_failure(rest)
        if isinstance(failure, ServiceError | OSError) and not isinstance(failure, _EndedError):
            ended = await self._one_that_ended()
            if ended is not None:
                raise ended from failure
        raise failure from failure.__cause__

    async def _one_that_ended(self) -> _EndedError | None:
        """The end of a process, from which broken calls may have followed."""
        watching = [asyncio.create_task(_raise_its_end(p)) for p in self._processes]
        if watching:
            await asyncio.wait(
                watching, timeout=_DEATH_GRACE_S, return_when=asyncio.FIRST_COMPLETED
            )
        for task in watching:
            task.cancel()
        results = await asyncio.gather(*watching, return_exceptions=True)
        return next((found for found in results if isinstance(found, _EndedError)), None)


async def _raise_its_end(process: RunningProcess) -> None:
    raise _EndedError(await process.ended(), service=process.name)


async def _switched_tokens(replicas: Mapping[str, RolloutControl]) -> dict[str, float]:
    stats = [await control.stats() for control in replicas.values()]
    return {
        metrics.ROLLOUT_TOKENS_KEPT: float(sum(found.tokens_kept for found in stats)),
        metrics.ROLLOUT_TOKENS_LOST: float(sum(found.tokens_lost for found in stats)),
    }


async def _busy_s(replicas: Mapping[str, RolloutControl]) -> float:
    return sum([(await control.stats()).busy_s for control in replicas.values()])
