"""The ledger: every decision of the data store, and none of its data.

    put -> Group (alive rows) -> ready queue of each task -> lease -> commit -> freed
                                        ^                      |
                                        '-- release, expiry ---'

A change of a group (a column written, a row back, dropped or freed) ends in `Task.settle` for each
task that sees it; nothing else touches the queues. What a shell must do about a change (wake
waiters, free payload, admit producers) is collected in `Effects`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncflow_core.batch import BatchRef, GroupKey, Key
from asyncflow_core.errors import BackpressureError, ConfigError, DataError
from asyncflow_core.ledger.credit import Credit
from asyncflow_core.ledger.drops import DropLog
from asyncflow_core.ledger.keys import KnownKeys
from asyncflow_core.ledger.leases import LeaseBook, LeaseRecord, Part
from asyncflow_core.ledger.policies import Budget, Candidate, Fifo, LeasePolicy
from asyncflow_core.ledger.registry import TaskTable
from asyncflow_core.ledger.rows import (
    MAX_SAMPLES,
    Admission,
    Group,
    View,
    locate,
    masks_by_group,
    row_number,
    samples_in,
)
from asyncflow_core.ledger.tasks import Task
from asyncflow_core.services.data_store import (
    CommitResult,
    Lease,
    StoreStats,
    TaskSpec,
)

__all__ = ["Claim", "Effects", "Grant", "Intake", "Ledger"]


@dataclass(slots=True)
class Effects:
    """What happened since the shell last asked.

    Attributes:
        ready: tasks whose queue got rows, or that ended: whoever waits for them tries again.
        gone: groups with the rows of theirs that are gone; their payload and credit are free.
        groups_dropped: the log of dropped groups grew.
    """

    ready: set[str] = field(default_factory=set)
    gone: list[tuple[Group, int]] = field(default_factory=list)
    groups_dropped: bool = False

    @property
    def freed(self) -> list[int]:
        """The rows of `gone` by number."""
        return [
            row_number(g.number, sample) for g, mask in self.gone for sample in samples_in(mask)
        ]


class Claim(NamedTuple):
    """What a lease's reference stands for now.

    Attributes:
        task: whose lease it is.
        held: positions in the reference of rows the lease holds; the others were committed by it
            before, or dropped.
    """

    task: TaskSpec
    held: tuple[int, ...]


class Grant(NamedTuple):
    """A hand-out.

    Attributes:
        lease_id: of the new lease; its fence too.
        task: whose it is.
        picks: groups with the rows handed out, in order.
    """

    lease_id: int
    task: TaskSpec
    picks: list[tuple[Group, int]]


class Intake:
    """Puts groups of one admission: what they have in common is looked up once."""

    def __init__(self, ledger: Ledger, admission: Admission) -> None:
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


class Ledger:
    """Rows, tasks, leases and credit of one store.

    Time is what callers pass as `now`: any clock that never runs back. Calls with a `now` first
    `advance` to it. Shells call `advance` at `next_deadline()` at the latest; a longer silence
    than `max_gap_s` while leases live means that this process stood still, and lets them all live
    longer by as much.
    """

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
            policies: lease policies beside "fifo".
            first_lease: lease numbers begin above it: above those of an earlier life.
        """
        if max_staleness < 0:
            raise ConfigError(f"max_staleness counts versions from 0, got {max_staleness}")
        self.policies: dict[str, LeasePolicy] = {"fifo": Fifo(), **(policies or {})}
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

    # Tasks

    def register(self, spec: TaskSpec) -> None:
        """Add a task, or a member to it; it sees groups put from now on.

        Raises:
            ConfigError: see `DataStore.register`.
        """
        self._tasks.join(spec)

    def leave(self, name: str) -> bool:
        """Take a member from a task; the last one ends it: its leases are void, rows go on.

        Returns:
            Whether the task ended.
        """
        task = self._tasks.leave(name)
        if task is None:
            return False
        for lease in [lease for lease in self._leases.live.values() if lease.task is task]:
            self._lose(lease)
        for group in list(self._groups.values()):
            group.views = tuple(view for view in group.views if view.task is not task)
            task.queue.discard(group)  # remembered leases keep the task, not its rows
            self._free_done(group)
        self._effects.ready.add(name)
        return True

    # Rows

    def known(self, key: GroupKey) -> bool:
        """Whether the group was ever put."""
        return key in self._known

    def fits(self, admission: Admission) -> bool:
        """Whether there is credit for one group now.

        Raises:
            BackpressureError: there will never be.
        """
        return self._credit.fits(admission)

    def check_admission(self, admission: Admission) -> None:
        """Raise `DataError` for groups that could never move through the store."""
        if not 1 <= admission.samples <= MAX_SAMPLES or admission.row_bytes < 0:
            raise DataError(
                f"a group has 1 to {MAX_SAMPLES} samples of row_bytes >= 0, got "
                f"{admission.samples} of {admission.row_bytes}"
            )
        self._tasks.check(admission)

    def put(
        self,
        key: GroupKey,
        admission: Admission,
        *,
        tokens: int = 0,
        oldest: int | None = None,
        place: int = -1,
    ) -> int | None:
        """Store a group that fits; its number, or None when its key is known.

        Args:
            key: of the group.
            admission: what it comes with.
            tokens: of each row, so far.
            oldest: oldest version of the response, if the group comes with one.
            place: of its payload, as the shell counts.
        """
        if key in self._known:
            return None
        intake = self.intake(admission)
        if not self.fits(admission):
            raise BackpressureError(f"group {tuple(key)} does not fit now; wait for credit")
        return intake.put(key, tokens=tokens, oldest=oldest, place=place)

    def intake(self, admission: Admission) -> Intake:
        """For many groups of one admission; good until tasks change.

        Raises:
            DataError: the groups could never move through the store.
        """
        self.check_admission(admission)
        return Intake(self, admission)

    def _add(self, group: Group) -> None:
        """Take a new group, whose views are in line with the queues."""
        self._known.add(group.key)
        self._groups[group.number] = self._by_key[group.key] = group
        self._credit.take(group.admission, group.alive.bit_count())
        self._rows_put += group.alive.bit_count()

    def drop(self, keys: Iterable[Key], *, reason: str) -> int:
        """Take rows out for every task; returns how many were there.

        A group is logged as dropped when no row of it is left and none was completed.
        """
        masks: dict[GroupKey, int] = {}
        for key in keys:
            if not 0 <= key.sample < MAX_SAMPLES:
                raise DataError(f"key {key} has a sample out of 0 to {MAX_SAMPLES - 1}")
            masks[key.group] = masks.get(key.group, 0) | 1 << key.sample
        count = 0
        for group_key, mask in masks.items():
            group = self._by_key.get(group_key)
            if group is not None and mask & group.alive:
                count += (mask & group.alive).bit_count()
                self._drop_rows(group, mask & group.alive, reason)
        return count

    # Leases

    def lease(
        self,
        now: float,
        task: str,
        *,
        requester: str,
        version: int | None = None,
        limit_rows: int | None = None,
        limit_tokens: int | None = None,
        policy: str = "fifo",
        lease_s: float = 60.0,
    ) -> Lease | None:
        """Hand out ready rows, as `DataStore.lease` says; None when there are none now."""
        grant = self.grant(
            now,
            task,
            requester=requester,
            version=version,
            limit_rows=limit_rows,
            limit_tokens=limit_tokens,
            policy=policy,
            lease_s=lease_s,
        )
        if grant is None:
            return None
        return Lease(
            lease_id=grant.lease_id,
            task=task,
            requester=requester,
            fence=grant.lease_id,
            lease_s=lease_s,
            rows=tuple(group.info(s) for group, mask in grant.picks for s in samples_in(mask)),
        )

    def grant(
        self,
        now: float,
        task: str,
        *,
        requester: str,
        version: int | None = None,
        limit_rows: int | None = None,
        limit_tokens: int | None = None,
        policy: str = "fifo",
        lease_s: float = 60.0,
    ) -> Grant | None:
        """`lease`, without a word on each row: for shells that say it in their own form."""
        self.advance(now)
        owner = self._tasks.for_lease(task, version)
        order = self._tasks.policy(self.policies, policy, limit_rows, limit_tokens, lease_s)
        picks = self._pick(owner, version, order, Budget(limit_rows, limit_tokens), requester)
        if not picks:
            return None
        lease = self._leases.open(owner, requester, now + lease_s)
        for group, view, mask in picks:
            lease.parts[group.number] = Part(mask)
            lease.held += mask.bit_count()
            view.leases += (lease,)
        lease.rows = lease.held
        owner.hold(requester, lease.held)
        return Grant(lease.lease_id, owner.spec, [(group, mask) for group, _, mask in picks])

    def renew(self, now: float, leases: Sequence[int], *, lease_s: float) -> tuple[int, ...]:
        """Let leases live at least `lease_s` from now (never shorter); returns the lost ones.

        A lease all of whose rows were committed or released is over, not lost.
        """
        self.advance(now)
        lost = []
        for lease_id in leases:
            lease = self._leases.get(lease_id)
            if lease is None or lease.lost:
                lost.append(lease_id)
            else:
                lease.expires = max(lease.expires, now + lease_s)
        return tuple(lost)

    def inspect(self, now: float, ref: BatchRef) -> Claim:
        """What `commit` would do with these rows; changes nothing.

        Raises:
            LeaseLostError: it would be refused.
            DataError: a row is named twice.
        """
        self.advance(now)
        lease = self._leases.find(ref, masks_by_group(ref.rows))
        held = []
        for position, row in enumerate(ref.rows):
            number, sample = locate(row)
            if lease.parts[number].held >> sample & 1:
                held.append(position)
        return Claim(lease.task.spec, tuple(held))

    def commit(
        self,
        now: float,
        ref: BatchRef,
        *,
        tokens: Mapping[int, int] | None = None,
        oldest: Mapping[int, int | None] | None = None,
    ) -> CommitResult:
        """Acknowledge rows; the task's columns are there from now on.

        Args:
            now: the time.
            ref: any part of a lease.
            tokens: row to tokens that the new columns add.
            oldest: row to the oldest version of its response.

        Raises:
            LeaseLostError: the lease ended or does not hold a row; nothing was done.
        """
        self.advance(now)
        masks = masks_by_group(ref.rows)
        lease = self._leases.find(ref, masks)
        committed = repeated = dropped = 0
        for number, mask in masks.items():
            part = lease.parts[number]
            repeated += (mask & part.committed).bit_count()
            dropped += (mask & part.dropped).bit_count()
            if mask & part.held:
                committed += (mask & part.held).bit_count()
                self._commit_rows(lease, number, mask & part.held, tokens or {}, oldest or {})
        return CommitResult(committed, repeated, dropped)

    def redo(
        self,
        task: str,
        rows: Sequence[int],
        *,
        tokens: Mapping[int, int],
        oldest: Mapping[int, int | None],
    ) -> None:
        """Commit rows without a lease: for shells that read back what was committed before."""
        for number, mask in masks_by_group(rows).items():
            group = self._groups[number]
            view = next(v for v in group.views if v.task.spec.name == task)
            new = mask & group.alive & ~view.done
            if new:
                self._complete(group, view, new, tokens, oldest)
                self._settle(group)  # unlike leased rows, these may stand in the queue

    def undo(self, task: str, rows: Sequence[int]) -> int:
        """Let a task have living rows again that it committed; returns how many there were."""
        count = 0
        for number, mask in masks_by_group(rows).items():
            group = self._groups[number]
            view = next(v for v in group.views if v.task.spec.name == task)
            again = mask & group.alive & view.done
            view.done &= ~again
            view.task.committed -= again.bit_count()
            count += again.bit_count()
            self._settle(group)
        return count

    def revive(self, old: Group, mask: int, done: Mapping[str, int]) -> Group:
        """A group again of which no row is left, from what its shell kept of it.

        Args:
            old: as it was.
            mask: rows that are to live.
            done: task to rows it is done with, all of them for a task that is not named.
        """
        self._last_group += 1
        views = []
        for task in self._tasks.seeing(old.admission.partition):
            view = View(task)
            view.done = mask & done.get(task.spec.name, mask)
            views.append(view)
        group = Group(
            self._last_group, old.key, old.admission,
            tokens=0, oldest=None, has=old.has.copy(), views=tuple(views),
        )  # fmt: skip
        group.tokens, group.oldest, group.place = old.tokens, old.oldest, old.place
        group.alive, group.completed = mask, old.completed
        self._add(group)
        self._free_done(group)
        if group.alive:
            self._settle(group)
        return group

    def release(self, now: float, ref: BatchRef) -> None:
        """Give rows back, to the front of their queue; rows the lease does not hold are ignored."""
        self.advance(now)
        lease = self._leases.live.get(ref.lease_id)
        if lease is not None and ref.fence == lease.lease_id:
            self._give_back(lease, masks_by_group(ref.rows))

    # Time

    def advance(self, now: float) -> None:
        """Let time pass: end leases that expired, after making up for a clock that jumped."""
        if self._now is not None and now - self._now > self._max_gap_s:
            self._leases.extend(self._leases.live.values(), now - self._now)
        self._now = now if self._now is None else max(now, self._now)
        for lease in self._leases.due(self._now):
            lease.task.expired += 1
            self._lose(lease)

    def next_deadline(self) -> float | None:
        """When to call `advance` at the latest; None while no lease lives."""
        deadline = self._leases.next_deadline()
        if deadline is None or self._now is None:
            return None
        return min(deadline, self._now + self._max_gap_s / 2)

    # For the shell

    def find(self, key: GroupKey) -> Group | None:
        """The group of a key; None when no row of it lives."""
        return self._by_key.get(key)

    def groups(self) -> Iterator[Group]:
        """All groups of which a row lives."""
        return iter(list(self._groups.values()))

    def known_keys(self) -> KnownKeys:
        """Every group key ever put, to be kept and given back by shells that outlive a process."""
        return self._known

    def presence(self, masks: Mapping[str, int]) -> list[int]:
        """Column names to rows, as a group's `has`."""
        return self._tasks.by_number(masks)

    def columns_of(self, group: Group) -> dict[str, int]:
        """Inverse of `presence`."""
        return self._tasks.by_name(group.has)

    def drop_log(self) -> DropLog:
        """What was dropped, to be kept and given back by shells that outlive a process."""
        return self._drops

    def task_of(self, lease_id: int) -> TaskSpec | None:
        """The task of a live or remembered lease."""
        lease = self._leases.get(lease_id)
        return None if lease is None else lease.task.spec

    def group(self, number: int) -> Group:
        """A group of which a row lives."""
        return self._groups[number]

    def key_of(self, row: int) -> Key:
        """The key of a living row."""
        number, sample = locate(row)
        return Key(*self._groups[number].key, sample)

    @property
    def last_serial(self) -> int:
        """Serial of the group dropped last; 0 when none was."""
        return self._drops.last_serial

    def take_effects(self) -> Effects:
        """What happened since the last call."""
        effects, self._effects = self._effects, Effects()
        return effects

    def stats(self, *, drops_after: int = 0) -> StoreStats:
        """All that the ledger knows of `StoreStats`: not the payload's bytes, not who waits."""
        return StoreStats(
            rows=self._rows_put - self._rows_freed,
            reserved_rows=self._credit.rows,
            capacity_rows=self._credit.capacity_rows,
            reserved_bytes=self._credit.bytes,
            capacity_bytes=self._credit.capacity_bytes,
            rows_put=self._rows_put,
            rows_freed=self._rows_freed,
            rows_dropped=dict(self._drops.rows),
            dropped_groups=self._drops.after(drops_after),
            tasks=self._tasks.stats(),
        )

    # Changes of a group

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
                group.tokens[sample] += tokens.get(row, 0)
                version = oldest.get(row)
                if version is not None:
                    group.oldest[sample] = version
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
