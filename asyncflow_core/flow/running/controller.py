"""One run: starts the processes, admits prompts, keeps versions, starts weight updates, watches.

It is not on the data path: rows go between the store and the services.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from asyncflow_core.errors import ServiceError
from asyncflow_core.flow.building import build
from asyncflow_core.flow.planning.plan import Plan
from asyncflow_core.flow.processes.control import RolloutControl, StageControl, TrainerControl
from asyncflow_core.flow.processes.launch import Launcher
from asyncflow_core.flow.processes.replicas import Replicas
from asyncflow_core.flow.processes.supervision import EndedError, Processes
from asyncflow_core.flow.processes.waits import Batch, Waits, said
from asyncflow_core.flow.running.folder import RunFolder
from asyncflow_core.flow.running.policies.over_sampling import STRAGGLER
from asyncflow_core.flow.running.record import Recorder
from asyncflow_core.flow.running.results import StepResult, Summary
from asyncflow_core.flow.running.saving import bring_back_rows
from asyncflow_core.flow.running.status import Staleness
from asyncflow_core.flow.running.steps import Parts, Steps
from asyncflow_core.flow.running.supply import Supply
from asyncflow_core.flow.running.totals import Totals
from asyncflow_core.flow.running.watching import Watching
from asyncflow_core.flow.weights.switching import Switching
from asyncflow_core.flow.working.threads import DaemonThread
from asyncflow_core.flow.working.worker import first_failure
from asyncflow_core.flow.working.workers_here import keep, workers_here
from asyncflow_core.parts import PartContext, Tokenizer
from asyncflow_core.services.data_store import DataStore, DroppedGroup

__all__ = ["Controller"]

_log = logging.getLogger(__name__)


class _FinishedError(Exception):
    """Ends the task group of a run that came to its end."""


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
        self._processes = Processes(plan, folder.path / "logs")
        fresh = Totals(staleness=Staleness(plan.config.workflow.bound))
        self._totals = folder.start.totals or fresh
        self._rows_kept = False
        self._began = 0.0
        controls = self._processes.controls
        self._watching = Watching(plan.config, folder.path, self._totals, controls)

    async def run(self) -> Summary:
        """Run to the end; every process is gone when this returns or raises.

        Raises:
            PeerLostError: a process ended; its name, status and last log lines.
            AsyncFlowError: whatever else went wrong.
        """
        # As if the lives before had gone on without a break.
        self._began = time.perf_counter() - self._totals.total_s
        async with AsyncExitStack() as stack:
            stack.callback(self._folder.close)
            stack.enter_context(self._watching.to_the_end())
            launcher: Launcher = await self._opened(stack, "launcher")
            store: DataStore = await self._opened(stack, "data_store", launcher.run_dir)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._main(group, stack, launcher, store))
            except BaseExceptionGroup as failures:
                await self._raise_why(failures)
            stats = await store.stats()
        self._totals.total_s = time.perf_counter() - self._began
        summary = self._totals.summary(
            self._config,
            dict(self._totals.rows_dropped + Counter(stats.rows_dropped)),
            self._watching.tokens(),
        )
        summary = replace(
            summary,
            restarts=dict(self._processes.restarts.count),
            work=self._watching.work(),
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
        await self._bring_back(store)
        flow, watchdog = self._config.workflow, self._config.watchdog
        waits = Waits(
            store,
            Batch(flow.groups_per_step, flow.group_size),
            idle_s=watchdog.idle_s,
            clock=self._processes.clock.now,
        )
        group.create_task(waits.run())
        looking = DaemonThread("status")
        stack.callback(looking.shutdown, wait=False, cancel_futures=True)
        group.create_task(self._watching.run(store, waits, looking))
        await self._processes.start(group, stack, launcher, store, waits)
        parts = await self._connect(group, stack, store, waits)
        steps = Steps(self._plan, self._folder, parts, self._totals, self._on_step, self._began)
        await steps.run(group)
        await self._watching.last_look(store, waits)  # while everybody still answers
        if self._config.workflow.extra_groups:
            # Responses of stragglers that had ended, and were dropped before they were rewarded.
            self._totals.wasted[STRAGGLER] += max(0, self._watching.tokens().elsewhere)
        raise _FinishedError

    async def _connect(
        self, group: asyncio.TaskGroup, stack: AsyncExitStack, store: DataStore, waits: Waits
    ) -> Parts:
        """Register every task before the first row, which it would not see; start the workers."""
        waits.begin("making the tokenizer, the prompts and the workers")
        drawing, writing = DaemonThread("prompts"), DaemonThread("recorder")
        for thread in (drawing, writing):
            stack.callback(thread.shutdown, wait=False, cancel_futures=True)
        aside = partial(asyncio.get_running_loop().run_in_executor, drawing)
        tokenizer: Tokenizer = await aside(self._build, "tokenizer")
        prompts = await aside(self._build, "prompts", tokenizer)
        start = self._folder.start
        recorder = Recorder(self._folder, tokenizer, writing, first_batch=start.version)
        wasted = self._totals.wasted
        workers = workers_here(self._plan, store, tokenizer, recorder, wasted, stack)
        self._watching.workers(workers)
        for worker in workers:
            await worker.register()
        controls = self._processes.controls
        for name, control in controls.items():
            if isinstance(control, StageControl):
                waits.begin(f"{name} registers its task")
                await control.start()
        for worker in workers:
            group.create_task(keep(worker, self._processes.restarts, self._processes.clock))
        trainer = next(c for c in controls.values() if isinstance(c, TrainerControl))
        rollouts = {n: c for n, c in controls.items() if isinstance(c, RolloutControl)}
        replicas = Replicas(
            rollouts,
            self._processes.end,
            timeout_s=self._config.rollout.timeout_s,
            clock=self._processes.clock.now,
        )
        switching = Switching(
            rollouts,
            trainer,
            self._plan.switch_mode,
            group,
            self._config.weight_sync,
            self._processes.clock.now,
            concurrent_versions=self._plan.chosen["weight_sync"].capabilities.concurrent_versions,
            end=self._processes.end,
        )
        switching.start()
        supply = Supply(
            store,
            prompts,
            self._config,
            drawing,
            version=start.version,
            assigned=start.assigned,
            note=self._folder.note,
            dropped=partial(self._dropped, recorder),
        )
        if start.life:
            await supply.bring_back(start.life if self._rows_kept else 0, start.dropped)
        self._keep_alive(replicas, switching)
        group.create_task(replicas.run())
        return Parts(
            store,
            tokenizer,
            recorder,
            supply,
            trainer,
            replicas,
            switching,
            waits,
            self._processes.restarts,
        )

    async def _bring_back(self, store: DataStore) -> None:
        """In a later life: let a store that outlived the last one forget what is void."""
        start, exact = self._folder.start, self._config.checkpoint.resume == "exact"
        durable = getattr(self._plan.chosen["data_store"].options, "durability", "none") != "none"
        if start.life and durable:
            self._rows_kept = await bring_back_rows(store, start.version, exact=exact)
        elif start.tokens_redone and not exact:
            _log.warning(
                "the data store keeps nothing beyond its process: all rows that are not trained "
                "are generated again; data_store.plugin=zmq with durability journal keeps them"
            )
        if self._rows_kept:  # it knows what was dropped
            self._totals.rows_dropped.clear()
        wasted = start.tokens_void if self._rows_kept else start.tokens_redone
        self._totals.wasted["resume"] += wasted

    def _dropped(self, recorder: Recorder, dropped: DroppedGroup) -> None:
        """Forget a group, and count what was generated for nothing where nobody else does."""
        tokens = recorder.forget(dropped.group)
        if dropped.reason == STRAGGLER:
            self._totals.wasted[STRAGGLER] += tokens

    def _keep_alive(self, replicas: Replicas, switching: Switching) -> None:
        """Tell the weight protocol and the counters of replicas that die and come back."""

        def left(name: str) -> None:
            if name.startswith("rollout-"):
                self._totals.wasted["died"] += replicas.left(name)
                self._watching.left(name)
                switching.left(name)

        async def back(name: str, control: Any) -> None:
            if isinstance(control, RolloutControl):
                replicas.back(name, control)
                switching.joined(name, control)

        self._processes.keep_alive(left, back)

    async def _opened(
        self, stack: AsyncExitStack, section: str, run_dir: Path | None = None
    ) -> Any:
        """A service of the run's own process, which the stack closes; neither hangs unsaid."""
        service = self._build(section, run_dir=run_dir)

        async def close() -> None:
            async with said(f"{section} is being closed and has not ended"):
                await service.aclose()

        async with said(f"{section} is being opened and does not answer"):
            await service.__aenter__()
        stack.push_async_callback(close)
        return service

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
        return build(chosen.plugin, chosen.options, context)

    async def _raise_why(self, failures: BaseExceptionGroup[BaseException]) -> None:
        """Raise what ended the run; return if it came to its end."""
        _, rest = failures.split(_FinishedError)
        if rest is None:
            return
        failure = first_failure(rest)
        if isinstance(failure, ServiceError | OSError) and not isinstance(failure, EndedError):
            ended = await self._processes.one_that_ended()
            if ended is not None:
                raise ended from failure
        raise failure from failure.__cause__
