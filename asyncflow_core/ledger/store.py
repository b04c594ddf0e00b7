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

from asyncflow_core.batch import BatchRef, GroupKey, Key
from asyncflow_core.errors import BackpressureError, DataError
from asyncflow_core.ledger.changes import Changes, Intake
from asyncflow_core.ledger.drops import DropLog
from asyncflow_core.ledger.keys import KnownKeys
from asyncflow_core.ledger.leases import Part
from asyncflow_core.ledger.outcomes import Claim, Effects, Grant
from asyncflow_core.ledger.policies import (
    Budget,
)
from asyncflow_core.ledger.rows import (
    MAX_SAMPLES,
    Admission,
    Group,
    View,
    locate,
    masks_by_group,
    samples_in,
)
from asyncflow_core.services.data_store import (
    CommitResult,
    Lease,
    StoreStats,
    TaskSpec,
)

__all__ = ["Claim", "Effects", "Grant", "Intake", "Ledger"]


class Ledger(Changes):
    """Rows, tasks, leases and credit of one store.

    Time is what callers pass as `now`: any clock that never runs back. Calls with a `now` first
    `advance` to it. Shells call `advance` at `next_deadline()` at the latest; a longer silence
    than `max_gap_s` while leases live means that this process stood still, and lets them all live
    longer by as much.
    """

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

    def room(self, admission: Admission) -> int:
        """For how many groups there is credit now; raises as `fits`."""
        return self._credit.room(admission)

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
        group.facts, group.place = old.facts, old.place
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

    def evict(self, now: float, requester: str) -> int:
        """End all leases of a requester that is gone; how many rows go to others."""
        self.advance(now)
        lost = [lease for lease in self._leases.live.values() if lease.requester == requester]
        count = sum(lease.held for lease in lost)
        for lease in reversed(lost):  # so that the first comes out first
            self._lose(lease)
        return count

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
