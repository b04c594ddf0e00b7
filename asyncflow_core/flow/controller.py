"""One run: starts the processes, admits prompts, keeps versions, starts weight updates, watches.

It is not on the data path: rows go between the store and the services.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from asyncflow_core.errors import ServiceError
from asyncflow_core.flow.control import RolloutControl, StageControl, TrainerControl
from asyncflow_core.flow.launch import Launcher
from asyncflow_core.flow.plan import Plan
from asyncflow_core.flow.processes import EndedError, Processes
from asyncflow_core.flow.record import Recorder, RunFolder
from asyncflow_core.flow.results import StepResult, Summary
from asyncflow_core.flow.steps import Parts, Steps
from asyncflow_core.flow.supply import Supply
from asyncflow_core.flow.switching import Switching
from asyncflow_core.flow.threads import DaemonThread
from asyncflow_core.flow.totals import Totals
from asyncflow_core.flow.waits import Waits
from asyncflow_core.flow.worker import first_failure
from asyncflow_core.flow.workers_here import workers_here
from asyncflow_core.parts import PartContext, Tokenizer
from asyncflow_core.services.data_store import DataStore

__all__ = ["Controller"]


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
        await self._processes.start(group, stack, launcher, store, waits)
        parts = await self._connect(group, stack, store, waits)
        await Steps(self._plan, self._folder, parts, self._totals, self._on_step).run(group)
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
        recorder = Recorder(self._folder, tokenizer, writing)
        workers = workers_here(self._plan, store, tokenizer, recorder, stack)
        for worker in workers:
            await worker.register()
        controls = self._processes.controls
        for control in controls.values():
            if isinstance(control, StageControl):
                await control.start()
        for worker in workers:
            group.create_task(worker.run())
        trainer = next(c for c in controls.values() if isinstance(c, TrainerControl))
        replicas = {n: c for n, c in controls.items() if isinstance(c, RolloutControl)}
        switching = Switching(
            replicas, trainer, self._plan.switch_mode, group, self._config.weight_sync
        )
        switching.start()
        supply = Supply(store, prompts, self._config, drawing)
        group.create_task(supply.watch_drops())
        return Parts(store, tokenizer, recorder, supply, trainer, replicas, switching, waits)

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
        if isinstance(failure, ServiceError | OSError) and not isinstance(failure, EndedError):
            ended = await self._processes.one_that_ended()
            if ended is not None:
                raise ended from failure
        raise failure from failure.__cause__
