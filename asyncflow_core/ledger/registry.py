"""The registered tasks of a ledger and the columns they name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields

from asyncflow_core.errors import ConfigError, DataError, UnsupportedCapabilityError
from asyncflow_core.ledger.policies import LeasePolicy
from asyncflow_core.ledger.rows import Admission
from asyncflow_core.ledger.tasks import Task
from asyncflow_core.services.data_store import Order, TaskSpec, TaskStats

__all__ = ["TaskTable"]


class TaskTable:
    """Tasks by name, columns by number, and the checks a task's callers must pass.

    A column keeps its number for good, so a block's presence list is read by all tasks that see it.
    """

    def __init__(self, max_staleness: int) -> None:
        """No task."""
        self._max_staleness = max_staleness
        self._tasks: dict[str, Task] = {}
        self._columns: dict[str, int] = {}

    def join(self, spec: TaskSpec) -> None:
        """Add a task, or a member to the one with an equal spec."""
        task = self._tasks.get(spec.name)
        if task is not None and task.spec == spec:
            task.members += 1
            return
        faults = self._faults(spec)
        if faults:
            raise ConfigError(faults)
        reads, writes = (
            [self._columns.setdefault(name, len(self._columns)) for name in names]
            for names in (spec.reads, spec.writes)
        )
        self._tasks[spec.name] = Task(
            spec, reads=reads, writes=writes, max_staleness=self._max_staleness
        )

    def leave(self, name: str) -> Task | None:
        """Take a member; the task when it was its last, which ends it."""
        task = self._tasks.get(name)
        if task is None:
            return None
        task.members -= 1
        return None if task.members else self._tasks.pop(name)

    def seeing(self, partition: str) -> list[Task]:
        """The tasks that see a partition."""
        return [task for task in self._tasks.values() if partition in task.spec.partitions]

    def given(self, admission: Admission) -> list[bool]:
        """Column number to whether new groups have it."""
        given = set(admission.columns)
        return [name in given for name in self._columns]

    def by_number(self, masks: Mapping[str, int]) -> list[int]:
        """Rows by column name, as a block's presence list."""
        return [masks.get(name, 0) for name in self._columns]

    def by_name(self, has: list[int]) -> dict[str, int]:
        """Inverse of `by_number`, without columns that no row has."""
        return {name: mask for name, mask in zip(self._columns, has, strict=False) if mask}

    def stats(self) -> dict[str, TaskStats]:
        """Name to queue."""
        return {name: task.stats() for name, task in self._tasks.items()}

    def ready_rows(self, name: str) -> int | None:
        """Rows in a task's queue; None of one that is not registered."""
        task = self._tasks.get(name)
        return None if task is None else task.ready

    def opened(self, name: str) -> list[int]:
        """Batches of which a task with `batch_groups` gets all that is left."""
        return self._tasks[name].queue.opened()

    def open(self, name: str, batches: Iterable[int]) -> None:
        """From now on a task gets all that is left of these batches."""
        for batch in batches:
            self._tasks[name].queue.open(batch)

    def for_lease(self, name: str, version: int | None) -> Task:
        """The task, if its order agrees with whether there is a version."""
        task = self._tasks.get(name)
        if task is None:
            raise ConfigError(
                f"no task {name!r} is registered (registered: {sorted(self._tasks)}); "
                f"register it before leasing"
            )
        if (version is None) != (task.spec.order is Order.ANY):
            wants = "no version" if task.spec.order is Order.ANY else "a version"
            raise ConfigError(
                f"task {name!r} has order {task.spec.order.value!r}, so its leases take {wants}; "
                f"got version={version}"
            )
        return task

    def policy(
        self,
        policies: Mapping[str, LeasePolicy],
        name: str,
        limit_rows: int | None,
        limit_tokens: int | None,
        lease_s: float,
    ) -> LeasePolicy:
        """The policy of a lease request whose numbers make sense."""
        if name not in policies:
            raise UnsupportedCapabilityError(
                f"no lease policy {name!r} (there are: {sorted(policies)}); name one of these"
            )
        few = limit_rows is not None and limit_rows <= 0
        if lease_s <= 0 or few or (limit_tokens is not None and limit_tokens <= 0):
            numbers = {"limit_rows": limit_rows, "limit_tokens": limit_tokens, "lease_s": lease_s}
            wrong = {n: v for n, v in numbers.items() if v is not None and v <= 0}
            raise ConfigError(f"a lease's limits are above 0, got {wrong}; leave out a limit")
        return policies[name]

    def check(self, admission: Admission) -> None:
        """Refuse groups no task would ever take, or that carry what a task writes."""
        tasks = self.seeing(admission.partition)
        if not tasks:
            seen = sorted({p for task in self._tasks.values() for p in task.spec.partitions})
            raise DataError(
                f"no registered task sees partition {admission.partition!r} (seen: {seen}); "
                f"register its tasks before the put"
            )
        for task in tasks:
            spec = task.spec
            if admission.batch is None and spec.order is Order.STEP:
                raise DataError(
                    f"task {spec.name!r} trains batches and would never get rows outside them; "
                    f"give `batch`, or another partition than {admission.partition!r}"
                )
            written = sorted(set(spec.writes) & set(admission.columns))
            if written:
                raise DataError(
                    f"a put carries columns {written}, which task {spec.name!r} writes; "
                    f"a column has one writer: leave them out or do not register the task"
                )

    def _faults(self, spec: TaskSpec) -> list[str]:
        faults = []
        registered = self._tasks.get(spec.name)
        if registered is not None:
            differ = [
                f"{f.name}: {getattr(registered.spec, f.name)!r} / {getattr(spec, f.name)!r}"
                for f in fields(spec)
                if getattr(registered.spec, f.name) != getattr(spec, f.name)
            ]
            faults.append(
                f"task {spec.name!r} is registered with another spec ({'; '.join(differ)}); "
                f"use an equal spec to join it, or another name"
            )
        if not spec.name or not spec.partitions:
            faults.append(f"a task needs a name and a partition, got {spec}")
        if spec.batch_groups and not spec.whole_groups:
            faults.append(
                f"task {spec.name!r} waits for {spec.batch_groups} whole groups of a batch, so it "
                f"takes whole groups; set whole_groups, or leave batch_groups out"
            )
        both = sorted(set(spec.reads) & set(spec.writes))
        if both:
            faults.append(
                f"task {spec.name!r} reads and writes {both}, so its rows are never ready; "
                f"write another column"
            )
        for name, other in self._tasks.items():
            shared = sorted(set(spec.writes) & set(other.spec.writes))
            if shared and name != spec.name:
                faults.append(
                    f"tasks {name!r} and {spec.name!r} both write {shared}; "
                    f"a column has one writer: rename one"
                )
        return faults
