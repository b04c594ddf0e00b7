"""Looking at a run once a second: asks every worker what it did, writes `status.json`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncflow_core import metrics
from asyncflow_core.config import RunConfig
from asyncflow_core.errors import AsyncFlowError, EngineError
from asyncflow_core.flow.processes.control import (
    RolloutControl,
    StageControl,
    TrainerControl,
    WorkStats,
)
from asyncflow_core.flow.processes.waits import Waits
from asyncflow_core.flow.running.results import TaskWork
from asyncflow_core.flow.running.status import (
    STATUS_FILE,
    Counters,
    Shares,
    Status,
    Tokens,
    WorkerStatus,
    bottleneck,
)
from asyncflow_core.flow.running.totals import Totals
from asyncflow_core.flow.working.worker import Worker
from asyncflow_core.services.data_store import NO_DROPS, DataStore, StoreStats
from asyncflow_core.services.rollout import RolloutStats

__all__ = ["EVERY_S", "Watching"]

_log = logging.getLogger(__name__)

EVERY_S = 1.0
"""Seconds between two looks."""
_ANSWER_S = 0.2
"""What does not answer within this is shown as it was; its answer is waited for all the same."""
_LAST_ANSWER_S = 5.0
"""The same when a run has come to its end."""
_SILENT_S = 3.0
"""Silence that is worth showing."""


class Watching:
    """Keeps the picture of a run and its file.

    Nothing of the run waits for it, and no failure of it ends the run: a worker that does not
    answer is shown as silent, a disk that takes no file is said once.

    Concurrency: `run` is one task; each worker has at most one unanswered question.
    """

    def __init__(
        self, config: RunConfig, folder: Path, totals: Totals, controls: Mapping[str, Any]
    ) -> None:
        """Watch a run.

        Args:
            config: of the run.
            folder: where the file goes.
            totals: what is counted step by step.
            controls: process name to what it answers, as they are now.
        """
        self._config = config
        self._path = folder / STATUS_FILE
        self._totals = totals
        self._controls = controls
        self._workers: Sequence[Worker] = ()
        self._start = time.monotonic()
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._answers: dict[str, tuple[float, WorkStats, RolloutStats | None]] = {}
        self._shares = Shares()
        self._generated = Counters(totals.tokens_generated)
        self._kept, self._lost = Counters(totals.tokens_kept), Counters(totals.tokens_lost)
        self._store = StoreStats()
        self._waits: list[str] = []
        self._said = False
        self._untold: set[str] = set()
        self._writing = threading.Lock()
        self._ended = False

    def workers(self, workers: Sequence[Worker]) -> None:
        """Watch these of the run's own process, too."""
        self._workers = workers

    def left(self, name: str) -> None:
        """A replica died; what it said last stays counted."""
        for counters in (self._generated, self._kept, self._lost):
            counters.left(name)

    async def run(self, store: DataStore, waits: Waits, thread: Executor) -> None:
        """Look and write until cancelled; files are written on `thread`."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self.look(store, waits)
                await loop.run_in_executor(thread, self._write, self.status("running"))
                await asyncio.sleep(EVERY_S)
        finally:
            for task in self._asking.values():
                task.cancel()

    async def last_look(self, store: DataStore, waits: Waits) -> None:
        """Ask everybody once more, and give them time: the summary has what they say."""
        if self._asking:
            await asyncio.wait(self._asking.values(), timeout=_LAST_ANSWER_S)
        await self.look(store, waits, answer_s=_LAST_ANSWER_S)

    async def look(self, store: DataStore, waits: Waits, *, answer_s: float = _ANSWER_S) -> None:
        """Ask everybody once."""
        for name, control in list(self._controls.items()):
            asked = self._asking.get(name)
            if isinstance(control, StageControl) and (asked is None or asked.done()):
                self._asking[name] = asyncio.create_task(self._ask(name, control))
        if self._asking:
            await asyncio.wait(self._asking.values(), timeout=answer_s)
        try:
            self._store = await store.stats(drops_after=NO_DROPS)
            self._waits = waits.lines(self._store)
        except AsyncFlowError as error:
            self._waits = [f"the data store does not answer: {error}"]

    async def _ask(self, name: str, control: StageControl) -> None:
        try:
            work = await control.work()
            engine = await control.stats() if isinstance(control, RolloutControl) else None
        except AsyncFlowError as error:
            # It shows as silent; whether that ends the run is not for here to say.
            if isinstance(error, EngineError) and name not in self._untold:
                self._untold.add(name)
                _log.warning("%s does not tell its work, which is not counted: %s", name, error)
            return
        if self._controls.get(name) is not control:
            return  # it died since, and counts anew
        self._answers[name] = (time.monotonic(), work, engine)
        if engine is not None:
            self._generated.set(name, engine.tokens_generated)
            self._kept.set(name, engine.tokens_kept)
            self._lost.set(name, engine.tokens_lost)
            self._totals.tokens_generated = self._generated.total
            self._totals.tokens_kept = self._kept.total
            self._totals.tokens_lost = self._lost.total

    def tokens(self) -> Tokens:
        """Response tokens so far."""
        totals = self._totals
        wasted = {"switch or abort": totals.tokens_lost, **totals.wasted}
        trained, evaluated = totals.response_tokens, totals.tokens_evaluated
        return Tokens(
            # What an earlier life made after its checkpoint is not in what it saved, and what a
            # replica made after it was asked for the last time shows by what became of it.
            generated=max(
                totals.tokens_generated + totals.wasted["resume"],
                trained + evaluated + sum(wasted.values()),
            ),
            trained=trained,
            evaluated=evaluated,
            kept=totals.tokens_kept,
            wasted={cause: tokens for cause, tokens in wasted.items() if tokens},
        )

    def work(self) -> dict[str, TaskWork]:
        """Task to what its workers said last, those of the trainer and the recorder left out."""
        found: dict[str, list[WorkStats]] = {}
        for name, control in self._controls.items():
            if name in self._answers and isinstance(control, StageControl):
                found.setdefault(_task(name, control), []).append(self._answers[name][1])
        for worker in self._workers:
            found.setdefault(worker.task.name, []).append(worker.stats())
        return {
            task: TaskWork(
                len(stats),
                sum(work.rows for work in stats),
                sum(work.busy_s for work in stats),
                tuple(map(sum, zip(*(work.costs for work in stats), strict=True))),
            )
            for task, stats in found.items()
            if task not in ("train", "record")
        }

    def status(self, state: str, error: str = "") -> Status:
        """The picture now."""
        flow, totals, workers = self._config.workflow, self._totals, self._seen()
        # In a run that has ended nobody waits; what held it up last says what to change next time.
        live = state == "running"
        last = totals.last
        return Status(
            run=self._config.name,
            preset=flow.preset,
            state=state if not live or totals.begun else "starting",
            pid=os.getpid(),
            host=socket.gethostname(),
            time=time.time(),
            elapsed_s=time.monotonic() - self._start,
            every_s=EVERY_S,
            version=totals.steps,
            steps=flow.steps,
            step_wall_s=last.get(metrics.STEP_WALL_S, 0.0),
            tokens_per_s=last.get(metrics.TOKENS_PER_S, 0.0),
            reward=last.get(metrics.REWARD_MEAN),
            scores=list(totals.scores.items()),
            workers=workers,
            store=self._store,
            staleness=replace(totals.staleness),  # a thread writes it while the run goes on
            tokens=self.tokens(),
            waits=self._waits if live else [],
            bottleneck=bottleneck(workers, self._store, bound=flow.bound, preset=flow.preset),
            error=error,
        )

    @contextlib.contextmanager
    def to_the_end(self) -> Iterator[None]:
        """Write the last picture when the block ends, and how it ended."""
        try:
            yield
        except asyncio.CancelledError:
            self._end("interrupted", "")
            raise
        except BaseException as error:
            self._end("failed", f"{type(error).__name__}: {error}")
            raise
        self._end("finished", "")

    def _end(self, state: str, error: str) -> None:
        with self._writing:  # a write that was under way is over, and no further one begins
            self._ended = True
        self._replace(self.status(state, error))

    def _seen(self) -> list[WorkerStatus]:
        now, found = time.monotonic(), []
        for name, control in list(self._controls.items()):
            if not isinstance(control, StageControl):
                continue  # a further rank of the trainer does what its first one does
            at, work, engine = self._answers.get(name, (self._start, WorkStats(0, 0, 0), None))
            found.append(self._worker(name, _task(name, control), at, work, engine, now))
        here = (
            self._worker(worker.requester, worker.task.name, now, worker.stats(), None, now)
            for worker in self._workers
        )
        # As rows pass through them, whatever order the processes came up in.
        place = {"rollout": 0, "train": 2, "record": 3}
        return sorted([*found, *here], key=lambda w: (place.get(w.task, 1), w.task, w.name))

    def _worker(
        self,
        name: str,
        task: str,
        at: float,
        work: WorkStats,
        engine: RolloutStats | None,
        now: float,
    ) -> WorkerStatus:
        busy_s = work.busy_s if engine is None else engine.busy_s
        busy, wait = self._shares.add(name, at, busy_s, work.wait_s)
        silent_s = now - at
        status = WorkerStatus(
            name, task, busy, wait, work.rows, silent_s=silent_s if silent_s >= _SILENT_S else 0.0
        )
        if engine is None:
            return status
        return replace(
            status, version=engine.version, running=engine.running, waiting=engine.waiting
        )

    def _write(self, status: Status) -> None:
        with self._writing:
            if not self._ended:
                self._replace(status)

    def _replace(self, status: Status) -> None:
        temporary = self._path.with_name(f".{self._path.name}.tmp")
        try:
            temporary.write_bytes(status.to_json())
            temporary.replace(self._path)
        except OSError as error:
            if not self._said:
                self._said = True
                _log.warning("%s cannot be written: %s", self._path, error.strerror)


def _task(name: str, control: StageControl) -> str:
    if isinstance(control, TrainerControl):
        return "train"
    return "rollout" if isinstance(control, RolloutControl) else name.rpartition("-")[0]
