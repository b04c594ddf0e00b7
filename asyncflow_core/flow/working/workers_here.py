"""Workers in the run's own process: stages by plugin or by a Python function, and the recorder."""

from __future__ import annotations

import logging
from collections import Counter
from concurrent.futures import Executor
from contextlib import AsyncExitStack

from asyncflow_core.errors import ServiceError
from asyncflow_core.flow.planning.plan import Plan
from asyncflow_core.flow.planning.specs import in_processes
from asyncflow_core.flow.planning.stages import make_stage
from asyncflow_core.flow.processes.watchdog import Clock, Restarts
from asyncflow_core.flow.running.filtering import FILTER, filter_work
from asyncflow_core.flow.running.policies.dynamic_sampling import DynamicSampling
from asyncflow_core.flow.running.record import Recorder
from asyncflow_core.flow.working.costs import Costs
from asyncflow_core.flow.working.stage_work import stage_work
from asyncflow_core.flow.working.threads import DaemonThread
from asyncflow_core.flow.working.work import observer_work
from asyncflow_core.flow.working.worker import Worker
from asyncflow_core.parts import PartContext, StageContract, Tokenizer
from asyncflow_core.services.data_store import DataStore

__all__ = ["keep", "workers_here"]

_log = logging.getLogger(__name__)

_RECORD_ROWS = 512


def workers_here(
    plan: Plan,
    store: DataStore,
    tokenizer: Tokenizer,
    recorder: Recorder,
    wasted: Counter[str],
    stack: AsyncExitStack,
) -> list[Worker]:
    """All of them, not yet registered; each stage worker has a thread, which ends with `stack`.

    `wasted` counts response tokens that are thrown away.
    """
    workers = [
        Worker(
            store,
            plan.tasks["record"].spec,
            observer_work(recorder.observe),
            requester="recorder",
            rows_in_flight=_RECORD_ROWS,
        )
    ]
    if FILTER in plan.tasks:
        work, rows = filter_work(DynamicSampling(), wasted), _RECORD_ROWS
        task = plan.tasks[FILTER]
        workers.append(
            Worker(
                store,
                task.spec,
                work,
                requester=FILTER,
                rows_in_flight=rows,
                columns=task.columns,
            )
        )
    for name, stage in plan.config.stages.items():
        for number in range(0 if in_processes(stage) else stage.workers):
            executor = DaemonThread(f"{name}-{number}")
            stack.callback(executor.shutdown, wait=False, cancel_futures=True)
            context = PartContext(
                name=f"{name}-{number}",
                seed=plan.config.seed,
                tokenizer=tokenizer,
                registry=plan.registry,
            )
            workers.append(_stage_worker(plan, store, name, context, executor))
    return workers


async def keep(worker: Worker, restarts: Restarts, clock: Clock) -> None:
    """Run a worker; one whose stage failed works again, as often as a process may come back."""
    while True:
        try:
            await worker.run()
        except ServiceError as error:
            # Its subclasses tell of more than a call that failed: a thread that is stuck, a store
            # that is gone.
            if type(error) is not ServiceError or error.service != worker.requester:
                raise
            finished = worker.stats().rows
            if restarts.refusal(worker.requester, clock.now(), finished=finished):
                raise
            _log.warning("%s; its rows are worked on again", error)


def _stage_worker(
    plan: Plan, store: DataStore, name: str, context: PartContext, executor: Executor
) -> Worker:
    stage, task, chosen = (
        plan.config.stages[name],
        plan.tasks[name],
        plan.chosen.get(f"stages.{name}"),
    )
    made = make_stage(
        stage, chosen.plugin if chosen else None, chosen.options if chosen else None, context
    )
    spec, costs = task.spec, Costs()
    contract = StageContract(task.columns, spec.writes, spec.whole_groups, spec.partitions)
    return Worker(
        store,
        spec,
        stage_work(made, contract, context.name, executor, timeout_s=stage.timeout_s, costs=costs),
        requester=context.name,
        rows_in_flight=2 * stage.rows,
        rows_per_lease=stage.rows,
        policy=stage.lease_policy,
        columns=task.columns,
        costs=costs,
    )
