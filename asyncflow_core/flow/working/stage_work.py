"""What a stage's worker does with leased rows: calls the stage on a thread, within its time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np

from asyncflow_core.batch import Batch, Column
from asyncflow_core.errors import AsyncFlowError, DataError, ServiceError, ServiceTimeoutError
from asyncflow_core.flow.building import described
from asyncflow_core.flow.working.calls import ATTEMPTS, CallLog
from asyncflow_core.flow.working.costs import Costs
from asyncflow_core.flow.working.worker import Part, Work
from asyncflow_core.parts import Stage, StageContract
from asyncflow_core.schema import CANONICAL
from asyncflow_core.services.data_store import Lease, RowInfo

__all__ = ["stage_work", "to_columns"]

_log = logging.getLogger(__name__)


def stage_work(
    stage: Stage,
    contract: StageContract,
    name: str,
    executor: Executor,
    *,
    timeout_s: float | None = None,
    calls: CallLog | None = None,
    costs: Costs | None = None,
) -> Work:
    """Run a stage on a worker thread; its faults name it, its columns are brought to the schema.

    A call that takes longer than `timeout_s` ends the work. With `calls`, kept by a process that
    is ended and started again, its rows are called one by one then, and those to blame given up.
    What a call takes, from the end of the one before, is added to `costs`: reading its rows and
    committing them goes on beside other calls.
    """
    caller = _Caller(stage, contract, name, executor, timeout_s, calls, costs or Costs())

    async def work(lease: Lease, batch: Batch) -> AsyncGenerator[Part, None]:
        if calls is None:
            yield await caller.call(lease.rows, batch)
            return
        for positions in calls.parts(lease.rows, whole_groups=contract.whole_groups):
            rows = [lease.rows[position] for position in positions]
            if any(map(calls.given_up, rows)):
                yield caller.given_up(rows)
            else:
                yield await caller.call(rows, batch.take(positions))

    return work


class _Caller:
    """Makes one call at a time: there is one thread, and so there is one clock and one log."""

    def __init__(
        self,
        stage: Stage,
        contract: StageContract,
        name: str,
        executor: Executor,
        timeout_s: float | None,
        calls: CallLog | None,
        costs: Costs,
    ) -> None:
        self._stage = stage
        self._writes = contract.writes
        self._name = name
        self._executor = executor
        self._timeout_s = timeout_s
        self._calls = calls
        self._costs = costs
        self._turn = asyncio.Lock()

    async def call(self, rows: Sequence[RowInfo], batch: Batch) -> Part:
        """The stage's columns of these rows.

        Raises:
            ServiceTimeoutError: it did not return in time; its thread is lost.
            ServiceError: it raised.
        """
        async with self._turn:
            start = time.monotonic()
            if self._calls is not None:
                self._calls.begin(self._name, rows)
            loop = asyncio.get_running_loop()
            running = loop.run_in_executor(self._executor, self._on_thread, batch)
            running.add_done_callback(_seen)
            done, _ = await asyncio.wait({running}, timeout=self._timeout_s)
            if not done:
                raise self._too_long(len(rows))
            if self._calls is not None:
                self._calls.end(self._name)
            tokens = sum(info.tokens for info in rows)
            self._costs.add(time.monotonic() - start, len(rows), tokens)
            return Part(rows, running.result())

    def _on_thread(self, batch: Batch) -> Batch:
        # Caught here, on the thread: a StopIteration would never reach the event loop, and
        # sys.exit() or a cancelled task in a verifier would end it. Ctrl-C comes elsewhere.
        name = self._name
        try:
            columns = self._stage(batch)
        except AsyncFlowError:
            raise
        except BaseException as error:
            raise ServiceError(
                f"stage {name!r} failed: {described(error)}", service=name
            ) from error
        return to_columns(columns, self._writes, batch.rows, name)

    def _too_long(self, rows: int) -> ServiceTimeoutError:
        what = (
            f"stage {self._name!r} did not return from a call of {rows} rows within its timeout_s, "
            f"{self._timeout_s:g} s"
        )
        if self._calls is not None:
            self._calls.give_up(self._name)
            return ServiceTimeoutError(f"{what}; its process ends", service=self._name)
        return ServiceTimeoutError(
            f"{what}, and a call on a thread of the run cannot be ended; give the function as "
            f"module:name, so that it runs in a process that can, or raise timeout_s",
            service=self._name,
        )

    def given_up(self, rows: Sequence[RowInfo]) -> Part:
        """Rows that ended their process each time: a reward of 0, or no row."""
        reason = f"stage {self._name!r} did not return from it, or died of it, {ATTEMPTS} times"
        if set(self._writes) != {"reward", "reward_error"}:
            return Part(rows, drop=f"stage did not return: {reason}")
        _log.warning("row %s counts reward 0: %s", rows[0].key, reason)
        columns = {"reward": [0.0] * len(rows), "reward_error": [reason] * len(rows)}
        return Part(rows, to_columns(columns, self._writes, len(rows), self._name))


def _seen(call: asyncio.Future[Batch]) -> None:
    """Whoever waited may be gone when a call fails: that is no news of its own."""
    if not call.cancelled():
        call.exception()


def to_columns(columns: Any, writes: Sequence[str], rows: int, stage: str) -> Batch:
    """What a stage returned, as columns.

    Raises:
        DataError: not a mapping of exactly `writes`, values that are no column of the schema, or
            another number of rows.
    """
    if not isinstance(columns, Mapping) or set(columns) != set(writes):
        got = sorted(columns) if isinstance(columns, Mapping) else type(columns).__name__
        raise DataError(f"stage {stage!r} must return the columns {sorted(writes)}, got {got}")
    made: dict[str, Column] = {}
    for name, value in columns.items():
        try:
            column = made[name] = _to_column(name, value)
        except (TypeError, ValueError) as error:
            raise DataError(f"stage {stage!r}, column {name!r}: {error}") from error
        if len(column) != rows:
            raise DataError(
                f"stage {stage!r} returned {len(column)} rows in column {name!r} for {rows} rows"
            )
    return Batch(made, rows=rows)


def _to_column(name: str, value: Any) -> Column:
    if isinstance(value, Column):
        return value
    spec = CANONICAL.get(name)
    if spec is not None and spec.kind == "ragged":
        return Column.ragged(value, np.dtype(spec.dtype))
    if spec is not None and spec.kind == "dense":
        return Column.dense(value, np.dtype(spec.dtype))
    if isinstance(value, np.ndarray) and value.ndim and not value.dtype.hasobject:
        return Column.dense(value)
    return Column.objects(value)
