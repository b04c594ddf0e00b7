"""The ledger's state and every change of a group; `store.py` has what shells call.

A change (a column written, a row back, dropped or freed) ends in `Task.settle` for each task that
sees the group; nothing else touches the queues.
"""

from __future__ import annotations

from collections.abc import Mapping

from asyncflow_core.batch import GroupKey
from asyncflow_core.errors import ConfigError, DataError
from asyncflow_core.ledger.credit import Credit
from asyncflow_core.ledger.drops import DropLog
from asyncflow_core.ledger.keys import KnownKeys
from asyncflow_core.ledger.leases import LeaseBook, LeaseRecord
from asyncflow_core.ledger.outcomes import Effects
from asyncflow_core.ledger.policies import (
    Budget,
    Candidate,
    Fifo,
    LeasePolicy,
    StalestFirst,
    TokenBalanced,
)
from asyncflow_core.ledger.registry import TaskTable
from asyncflow_core.ledger.rows import Admission, Group, View, row_number, samples_in
from asyncflow_core.ledger.tasks import Task

__all__ = ["Changes", "Intake"]


class Changes:
    """What a ledger holds, and how it changes."""

    def __init__(
        self,
        *,
        capacity_rows: int,
        capacity_bytes: int,
        max_staleness: int = 0,
        max_gap_s: float = 5.0,
        remember_rows: int = 65536,
        policies: Mapping[str, LeasePolicy] | None = None,
        first_lease: int = 0,
    ) -> None:
        """An empty store.

        Args:
            capacity_rows: credit in rows.
            capacity_bytes: credit in bytes.
            max_staleness: versions, bounds what `Order.ADMITTED` tasks get.
            max_gap_s: longest time between two calls that is not taken for a stopped process.
            remember_rows: rows of ended leases to remember (see `LeaseBook`).
            policies: lease policies beside "fifo", "stalest_first" and "token_balanced".
            first_lease: lease numbers begin above it: above those of an earlier life.
        """
        if max_staleness < 0:
            raise ConfigError(f"max_staleness counts versions from 0, got {max_staleness}")
        self.policies: dict[str, LeasePolicy] = {
            "fifo": Fifo(),
            "stalest_first": StalestFirst(),
            "token_balanced": TokenBalanced(),
            **(policies or {}),
        }
        self._credit = Credit(capacity_rows, capacity_bytes)
        self._max_gap_s = max_gap_s
        self._now: float | None = None
        self._tasks = TaskTable(max_staleness)
        self._leases = LeaseBook(remember_rows=remember_rows, first=first_lease)
        self._known = KnownKeys()
        self._groups: dict[int, Group] = {}
        self._by_key: dict[GroupKey, Group] = {}
        self._last_group = 0
        self._rows_put = 0
        self._rows_freed = 0
        # Readers that keep up miss nothing: a store cannot drop more groups than it holds rows.
        self._drops = DropLog(length=max(1024, capacity_rows))
        self._effects = Effects()

    def _add(self, group: Group) -> None:
        """Take a new group, whose views are in line with the queues."""
        self._known.add(group.key)
        self._groups[group.number] = self._by_key[group.key] = group
        self._credit.take(group.admission, group.alive.bit_count())
        self._rows_put += group.alive.bit_count()

    def _settle(self, group: Group, *, front: View | None = None) -> None:
        for view in group.views:
            if view.task.settle(group, view, front=view is front):
                self._effects.ready.add(view.task.spec.name)

    def _pick(
        self, task: Task, version: int | None, policy: LeasePolicy, budget: Budget, requester: str
    ) -> list[tuple[Group, View, int]]:
        """Take rows from the queue into `View.leased` until the budget is full."""
        picks = []
        whole = task.spec.whole_groups
        fifo = isinstance(policy, Fifo)  # it sees no window: take as many as may be needed
        while not budget.full:
            groups = task.queue.pop(version, budget.window if fifo else policy.window)
            if not groups:
                break
            window = [Candidate(group, group.view(task)) for group in groups]
            left = []
            for candidate in policy.order(window, requester=requester, holders=task.holders):
                mask = budget.take(candidate, whole=whole)
                view = candidate.view
                if mask:
                    view.leased |= mask
                    picks.append((candidate.group, view, mask))
                if mask == view.offered:
                    task.take_all(view)
                else:
                    left.append(candidate.group.number)
            for candidate in reversed(window) if left else ():  # what was not taken keeps its place
                if candidate.group.number in left:
                    task.settle(candidate.group, candidate.view, front=True)
        return picks

    def _unhold(self, lease: LeaseRecord, number: int, mask: int) -> tuple[Group, View]:
        """The lease no longer holds these rows; it ends with its last one."""
        part, group = lease.parts[number], self._groups[number]
        view = group.view(lease.task)
        part.held &= ~mask
        view.leased &= ~mask
        if not part.held:
            others = view.leases
            view.leases = () if len(others) == 1 else tuple(o for o in others if o is not lease)
        lease.task.hold(lease.requester, -mask.bit_count())
        lease.held -= mask.bit_count()
        if not lease.held:
            self._leases.end(lease)
        return group, view

    def _give_back(self, lease: LeaseRecord, masks: Mapping[int, int]) -> None:
        for number, part in reversed(lease.parts.items()):  # so that the first comes out first
            mask = part.held & masks.get(number, 0)
            if mask:
                group, view = self._unhold(lease, number, mask)
                self._settle(group, front=view)

    def _lose(self, lease: LeaseRecord) -> None:
        lease.lost = True
        self._give_back(lease, {number: part.held for number, part in lease.parts.items()})

    def _commit_rows(
        self,
        lease: LeaseRecord,
        number: int,
        mask: int,
        tokens: Mapping[int, int],
        oldest: Mapping[int, int | None],
    ) -> None:
        lease.parts[number].committed |= mask
        group, view = self._unhold(lease, number, mask)
        self._complete(group, view, mask, tokens, oldest)

    def _complete(
        self,
        group: Group,
        view: View,
        mask: int,
        tokens: Mapping[int, int],
        oldest: Mapping[int, int | None],
    ) -> None:
        """Rows are done for a task: its columns are there, and what nobody needs is freed."""
        task = view.task
        view.done |= mask
        task.committed += mask.bit_count()
        for column in task.writes:
            group.has[column] |= mask
        if tokens or oldest:
            for sample in samples_in(mask):
                row = row_number(group.number, sample)
                group.facts[sample] += tokens.get(row, 0)
                version = oldest.get(row)
                if version is not None:
                    group.facts[sample - group.admission.samples] = version
        self._free_done(group)
        if group.alive:  # else every task is done with it
            self._settle(group)

    def _drop_rows(self, group: Group, mask: int, reason: str) -> None:
        for view in group.views:
            for lease in view.leases:
                part = lease.parts[group.number]
                gone = part.held & mask
                if gone:
                    part.dropped |= gone
                    self._unhold(lease, group.number, gone)
        self._drops.add_rows(mask.bit_count(), reason)
        self._free(group, mask)
        self._settle(group)
        if not group.alive and not group.completed:
            self._drops.add_group(group, reason)
            self._effects.groups_dropped = True

    def _free_done(self, group: Group) -> None:
        done = group.done_by_all()
        if done:
            group.completed = True
            self._free(group, done)

    def _free(self, group: Group, mask: int) -> None:
        """Take rows out of the store and give their credit back."""
        group.alive &= ~mask
        count = mask.bit_count()
        self._rows_freed += count
        self._credit.take(group.admission, -count)
        self._effects.gone.append((group, mask))
        if not group.alive:
            del self._groups[group.number], self._by_key[group.key]


class Intake:
    """Puts groups of one admission: what they have in common is looked up once."""

    def __init__(self, ledger: Changes, admission: Admission) -> None:
        """Of a checked admission; made by `Ledger.intake`."""
        self._ledger = ledger
        self._admission = admission
        self._has = ledger._tasks.presence(admission)
        self._full = (1 << admission.samples) - 1
        self._views = [
            (task, all(self._has[column] for column in task.reads))
            for task in ledger._tasks.seeing(admission.partition)
        ]
        ledger._effects.ready.update(task.spec.name for task, ready in self._views if ready)

    def put(self, key: GroupKey, *, tokens: int, oldest: int | None, place: int) -> int:
        """Store a group that is not known and fits; its number."""
        if min(key) < 0:
            raise DataError(f"group key {tuple(key)} has a negative part; count from 0")
        ledger = self._ledger
        ledger._last_group += 1
        views = tuple([View(task) for task, _ in self._views])
        group = Group(
            ledger._last_group,
            key,
            self._admission,
            tokens=tokens,
            oldest=oldest,
            has=self._has.copy(),
            views=views,
        )
        group.place = place
        ledger._add(group)
        for view, (task, ready) in zip(views, self._views, strict=True):
            if ready:
                task.offer_new(group, view, self._full)
        return group.number
