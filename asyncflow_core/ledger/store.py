"""The ledger: every decision of the data store, and none of its data.

    put -> Block (alive rows) -> ready queue of each task -> lease -> commit -> freed
                                        ^                      |
                                        '-- release, expiry ---'

A change of a block (a column written, a row back, dropped or freed) ends in `Task.settle` for each
task that sees it; nothing else touches the queues. What a shell must do about a change (wake
waiters, free payload, admit producers) is collected in `Effects`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from asyncflow_core.batch import BatchRef, GroupKey, Key
from asyncflow_core.errors import BackpressureError, DataError
from asyncflow_core.ledger.blocks import Block, View
from asyncflow_core.ledger.changes import Changes, Intake
from asyncflow_core.ledger.drops import DropLog
from asyncflow_core.ledger.keys import KnownKeys
from asyncflow_core.ledger.leases import Part
from asyncflow_core.ledger.masks import positions_in
from asyncflow_core.ledger.outcomes import Claim, Effects, Grant
from asyncflow_core.ledger.policies import Budget
from asyncflow_core.ledger.rows import (
    MAX_SAMPLES,
    NO_VERSION,
    Admission,
    locate,
    masks_by_block,
    row_number,
    runs_of,
)
from asyncflow_core.services.data_store import (
    CommitResult,
    Lease,
    StoreStats,
    TaskSpec,
)

__all__ = ["Claim", "Effects", "Grant", "Intake", "Ledger"]

_MAX_INTAKES = 64
"""Kept; one a global batch or two are in use."""


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
        self._intakes.clear()

    def leave(self, name: str) -> bool:
        """Take a member from a task; the last one ends it: its leases are void, rows go on.

        Returns:
            Whether the task ended.
        """
        task = self._tasks.leave(name)
        if task is None:
            return False
        self._intakes.clear()
        for lease in [lease for lease in self._leases.live.values() if lease.task is task]:
            self._lose(lease)
        for block in list(self._blocks.values()):
            block.views = tuple(view for view in block.views if view.task is not task)
            task.queue.discard(block)  # remembered leases keep the task, not its rows
            self._free_done(block)
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
        place: Any = None,
    ) -> int | None:
        """Store a group that fits; the number of its block, or None when its key is known.

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
        age = NO_VERSION if oldest is None else oldest
        return intake.put(key, (tokens,), (age,), place).number

    def intake(self, admission: Admission) -> Intake:
        """For many groups of one admission; good until tasks change.

        Raises:
            DataError: the groups could never move through the store.
        """
        intake = self._intakes.get(admission)
        if intake is None:
            self.check_admission(admission)
            if len(self._intakes) >= _MAX_INTAKES:
                self._intakes.clear()
            intake = self._intakes[admission] = Intake(self, admission)
        return intake

    def drop(self, keys: Iterable[Key], *, reason: str) -> int:
        """Take rows out for every task; returns how many were there.

        A group is logged as dropped when no row of it is left and none was completed.
        """
        masks: dict[Block, int] = {}
        groups: dict[GroupKey, Block] = {}  # in the order in which they are named
        for key in keys:
            if not 0 <= key.sample < MAX_SAMPLES:
                raise DataError(f"key {key} has a sample out of 0 to {MAX_SAMPLES - 1}")
            row = self.find(key)
            if row is not None:
                number, position = locate(row)
                block = groups[key.group] = self._blocks[number]
                masks[block] = masks.get(block, 0) | 1 << position
        for block, mask in masks.items():
            self._drop_rows(block, mask, reason)
        for group, block in groups.items():
            if not block.group_mask(group.sequence) & (block.alive | block.completed):
                self._drops.add_group(group, block.admission, reason)
                self._effects.groups_dropped = True
        return sum(mask.bit_count() for mask in masks.values())

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
            rows=tuple(block.info(r) for block, mask in grant.picks for r in positions_in(mask)),
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
        for block, view, mask in picks:
            part = lease.parts.setdefault(block.number, Part(0))
            part.held |= mask
            lease.held += mask.bit_count()
            view.hold(lease, mask)
        lease.rows = lease.held
        owner.hold(requester, lease.held)
        return Grant(lease.lease_id, owner.spec, [(block, mask) for block, _, mask in picks])

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
        runs = runs_of(ref.rows)
        masks = masks_by_block(runs)
        lease = self._leases.find(ref, masks)
        if not any(mask & ~lease.parts[number].held for number, mask in masks.items()):
            return Claim(lease.task.spec, range(len(ref.rows)))
        held = []
        for position, row in enumerate(ref.rows):
            number, place = locate(row)
            if lease.parts[number].held >> place & 1:
                held.append(position)
        return Claim(lease.task.spec, held)

    def commit(
        self,
        now: float,
        ref: BatchRef,
        *,
        tokens: Sequence[int] = (),
        oldest: Sequence[int] = (),
    ) -> CommitResult:
        """Acknowledge rows; the task's columns are there from now on.

        Args:
            now: the time.
            ref: any part of a lease.
            tokens: that the new columns add, of each row of `ref`; or none.
            oldest: version of the response of each row of `ref`, -1 for none; or none.

        Raises:
            LeaseLostError: the lease ended or does not hold a row; nothing was done.
        """
        self.advance(now)
        runs = runs_of(ref.rows)
        masks = masks_by_block(runs)
        lease = self._leases.find(ref, masks)
        committed = repeated = dropped = 0
        held: dict[int, int] = {}
        for number, mask in masks.items():
            part = lease.parts[number]
            repeated += (mask & part.committed).bit_count()
            dropped += (mask & part.dropped).bit_count()
            if mask & part.held:
                held[number] = mask & part.held
        if tokens or oldest:
            self._learn(runs, held, tokens, oldest)
        for number, mask in held.items():
            committed += mask.bit_count()
            lease.parts[number].committed |= mask
            self._complete(*self._unhold(lease, number, mask), mask)
        return CommitResult(committed, repeated, dropped)

    def redo(
        self, task: str, rows: Sequence[int], *, tokens: Sequence[int], oldest: Sequence[int]
    ) -> None:
        """`commit` without a lease: for shells that read back what was committed before."""
        runs = runs_of(rows)
        new = {}
        for number, mask in masks_by_block(runs).items():
            block = self._blocks[number]
            new[number] = mask & block.alive & ~block.view_of(task).done
        self._learn(runs, new, tokens, oldest)
        for number, mask in new.items():
            if mask:
                block = self._blocks[number]
                self._complete(block, block.view_of(task), mask)
                self._settle(block)  # unlike leased rows, these may stand in the queue

    def undo(self, task: str, block: Block, mask: int) -> int:
        """Let a task have living rows again that it committed; returns how many there were.

        What it wrote is not there any more, so that tasks that read it do not get the rows before.
        """
        view = block.view_of(task)
        again = mask & block.alive & view.done
        view.done &= ~again
        for column in view.task.writes:
            block.has[column] &= ~again
        view.task.committed -= again.bit_count()
        self._settle(block)
        return again.bit_count()

    def adopt(self, block: Block) -> None:
        """Give a number to a block that a shell made from what it kept; `revive` its rows next."""
        self._last_block += 1
        block.number = self._last_block
        block.origin = self._known.add(block.group_at(0), 0)

    def revive(self, block: Block, mask: int, done: Mapping[str, int]) -> None:
        """Let rows live again that are gone, from what their shell kept of them.

        Args:
            block: theirs, of which other rows may live yet.
            mask: the rows.
            done: task to rows it is done with, all of them for a task that is not named.
        """
        living = self._blocks.get(block.number) is block
        if living:
            block.alive |= mask
            self._count(block.admission, mask.bit_count())
            self._rows_put += mask.bit_count()
        else:
            block.views = tuple(map(View, self._tasks.seeing(block.admission.partition)))
            block.alive = mask
            self._add(block)
        for view in block.views:
            view.done = view.done & ~mask | mask & done.get(view.task.spec.name, mask)
        self._free_done(block)
        if block.alive:
            self._settle(block)

    def release(self, now: float, ref: BatchRef) -> None:
        """Give rows back, to the front of their queue; rows the lease does not hold are ignored."""
        self.advance(now)
        lease = self._leases.live.get(ref.lease_id)
        if lease is not None and ref.fence == lease.lease_id:
            self._give_back(lease, masks_by_block(runs_of(ref.rows)))

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

    def find(self, key: Key) -> int | None:
        """The row of a key; None when it does not live."""
        block = self._index.find(key.group)
        if block is None or key.sample >= block.admission.samples:
            return None
        position = (key.sequence - block.first) * block.admission.samples + key.sample
        return row_number(block.number, position) if block.alive >> position & 1 else None

    def blocks(self) -> Iterator[Block]:
        """All blocks of which a row lives."""
        return iter(list(self._blocks.values()))

    def known_keys(self) -> KnownKeys:
        """Every group key ever put, to be kept and given back by shells that outlive a process."""
        return self._known

    def presence(self, masks: Mapping[str, int]) -> list[int]:
        """Column names to rows, as a block's `has`."""
        return self._tasks.by_number(masks)

    def columns_of(self, block: Block) -> dict[str, int]:
        """Inverse of `presence`."""
        return self._tasks.by_name(block.has)

    def drop_log(self) -> DropLog:
        """What was dropped, to be kept and given back by shells that outlive a process."""
        return self._drops

    def task_of(self, lease_id: int) -> TaskSpec | None:
        """The task of a live or remembered lease."""
        lease = self._leases.get(lease_id)
        return None if lease is None else lease.task.spec

    def ready_rows(self, task: str) -> int | None:
        """Rows of a task that are ready; None of one that is not registered."""
        return self._tasks.ready_rows(task)

    def opened(self, task: str) -> list[int]:
        """Batches of a task with `batch_groups` that were whole once: it gets what is left."""
        return self._tasks.opened(task)

    def open(self, task: str, batches: Iterable[int]) -> None:
        """They were whole in the life before, for shells that outlive a process."""
        self._tasks.open(task, batches)

    def block(self, number: int) -> Block:
        """A block of which a row lives."""
        return self._blocks[number]

    def key_of(self, row: int) -> Key:
        """The key of a living row."""
        number, position = locate(row)
        return self._blocks[number].key_at(position)

    @property
    def last_serial(self) -> int:
        """Serial of the group dropped last; 0 when none was."""
        return self._drops.last_serial

    def take_effects(self) -> Effects:
        """What happened since the last call."""
        effects, self._effects = self._effects, Effects()
        return effects

    def stats(self, *, drops_after: int = 0, most_drops: int | None = None) -> StoreStats:
        """All that the ledger knows of `StoreStats`: not the payload's bytes, not who waits.

        Of the dropped groups the first `most_drops`, for shells that tell them in parts.
        """
        return StoreStats(
            rows=self._rows_put - self._rows_freed,
            rows_by_partition=dict(self._living),
            reserved_rows=self._credit.rows,
            capacity_rows=self._credit.capacity_rows,
            reserved_bytes=self._credit.bytes,
            capacity_bytes=self._credit.capacity_bytes,
            rows_put=self._rows_put,
            rows_freed=self._rows_freed,
            rows_dropped=dict(self._drops.rows),
            dropped_groups=self._drops.after(drops_after, most_drops),
            tasks=self._tasks.stats(),
        )
