"""The store's state: the ledger, and where each row's columns lie. Pure: no I/O, `now` passed in.

    client: borrow an extent -> copy columns into it -> put(segment, keys, facts)
    client: lease -> matrix of rows and places -> copy columns out of shared memory

The controller process wraps this in sockets (`controller.py`); payload never passes through it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncflow_core.batch import BatchRef, GroupKey, Key
from asyncflow_core.errors import ConfigError, DataError, LeaseLostError
from asyncflow_core.ledger import (
    Admission,
    Claim,
    Group,
    LeasePolicy,
    Ledger,
    locate,
    row_number,
    samples_in,
)
from asyncflow_core.schema import PER_TOKEN
from asyncflow_core.services.data_store import CommitResult, Order, StoreStats, TaskSpec
from asyncflow_store_zmq import history
from asyncflow_store_zmq.extents import Segment
from asyncflow_store_zmq.payload import Handout, Payload, Written
from asyncflow_store_zmq.retained import Retained

__all__ = ["Incoming", "Table"]

_BY_RESPONSE = frozenset((*PER_TOKEN, "versions"))


@dataclass(slots=True, eq=False)
class Incoming:
    """A put on its way in; `position` is the first group not yet stored."""

    keys: list[GroupKey]
    admission: Admission
    tokens: list[int]
    oldest: list[int]
    segment: Segment
    position: int = 0
    stored: int = 0


class Table:
    """Everything the controller knows.

    Attributes:
        ledger: rows, tasks, leases, credit.
        payload: where columns lie. pool: its memory.
        log: takes what must not be forgotten, in order, as plain lists; None forgets. Records are
            read back by `history.Replay`.
        retained: what waits for a checkpoint, where there is a log.
        ready: tasks whose waiters should try again; room: producers should; dropped: watchers.
    """

    def __init__(
        self,
        *,
        capacity_rows: int,
        capacity_bytes: int,
        max_staleness: int,
        max_gap_s: float,
        raise_generation: Callable[[int, int], int],
        policies: Mapping[str, LeasePolicy] | None = None,
        first_lease: int = 0,
    ) -> None:
        """An empty store; the arguments are the ledger's and the pool's."""
        self.ledger = Ledger(
            capacity_rows=capacity_rows,
            capacity_bytes=capacity_bytes,
            max_staleness=max_staleness,
            max_gap_s=max_gap_s,
            policies=policies,
            first_lease=first_lease,
        )
        self.payload = Payload(raise_generation)
        self.pool = self.payload.pool
        self._tasks: dict[str, TaskSpec] = {}
        self.log: Callable[[list[Any]], None] | None = None
        self.retained = Retained()
        self.ready: set[str] = set()
        self.room = False
        self.dropped = False

    # Tasks

    def register(self, spec: TaskSpec) -> None:
        """See `DataStore.register`."""
        self.ledger.register(spec)
        if spec.name not in self._tasks:
            self._tasks[spec.name] = spec
            self.payload.tasks_changed()
            self._log(history.task_record(spec))

    def leave(self, name: str, now: float) -> None:
        """Take a member from a task."""
        if self.ledger.leave(name):
            self._tasks.pop(name, None)
            self.payload.tasks_changed()
            self._log(["leave", name])
        self._follow(now)

    # Put

    def begin_put(
        self,
        holder: Hashable,
        written: Written,
        keys: list[GroupKey],
        admission: Admission,
        tokens: list[int],
        oldest: list[int],
    ) -> Incoming:
        """Check a put and take hold of its memory; `advance_put` stores its groups.

        Raises:
            DataError: see `DataStore.put`.
            BackpressureError: a group is larger than the whole store.
        """
        layout = self.payload.layout_of(written.layout)
        if not len(keys) == len(tokens) == len(oldest) == written.rows:
            raise DataError(f"a put of {written.rows} rows came with {len(keys)} keys")
        self.payload.agree(layout)
        if not all(map(self.ledger.known, keys)):
            self.ledger.check_admission(admission)
            self.ledger.fits(admission)
        return Incoming(keys, admission, tokens, oldest, self.payload.take(holder, written))

    def advance_put(self, put: Incoming) -> bool:
        """Store groups as far as there is credit; True when all are dealt with."""
        ledger, segment, admission = self.ledger, put.segment, put.admission
        plan = self.payload.plan(admission.partition, self._tasks.values())
        known = ledger.known_keys()
        room: int | None = None
        intake, first, entries = None, put.position, []
        for position in range(put.position, len(put.keys)):
            key = put.keys[position]
            if key not in known:
                room = ledger.room(admission) if room is None else room
                if room == 0:
                    break
                room -= 1
                if intake is None:
                    intake = ledger.intake(admission)
                place = self.payload.add_group(segment, position, plan, admission.samples)
                oldest = put.oldest[position]
                intake.put(
                    key,
                    tokens=put.tokens[position],
                    oldest=None if oldest < 0 else oldest,
                    place=place,
                )
                put.stored += 1
                entries.append(position)
            put.position += 1
        if self.log is not None and entries:
            self.log(history.put_record(put, self.payload.describe(segment), entries))
        self.ready |= ledger.take_effects().ready if put.position > first else set()
        return put.position == len(put.keys)

    def end_put(self, put: Incoming, now: float) -> None:
        """Let go of its memory: what no stored group needs is free."""
        self.payload.unref(put.segment, now)

    # Lease and read

    def lease(self, now: float, task: str, requester: str, **how: Any) -> Handout | None:
        """Hand out ready rows; None when there are none now."""
        grant = self.ledger.grant(now, task, requester=requester, **how)
        self._follow(now)
        if grant is None:
            return None
        spec = grant.task
        extra = []
        if "response_ids" not in spec.reads + spec.writes and _BY_RESPONSE & set(spec.writes):
            extra = ["response_ids"]  # its lengths check what will be written
        rows = [(group, sample) for group, mask in grant.picks for sample in samples_in(mask)]
        return self.payload.handout(grant.lease_id, rows, [*spec.reads, *extra], extra)

    def find(
        self, now: float, ref: BatchRef, columns: Sequence[str], extra: Sequence[str]
    ) -> Handout:
        """Where leased rows lie, by reference; `extra` columns need not be the task's.

        Raises:
            LeaseLostError: the lease does not hold all of them.
            DataError: a column the task does not read.
        """
        claim = self.inspect(now, ref)
        unread = sorted(set(columns) - set(claim.task.reads))
        if unread:
            raise DataError(
                f"task {claim.task.name!r} does not read {unread} (it reads: "
                f"{list(claim.task.reads)}); add them to its `reads`"
            )
        if len(claim.held) < len(ref.rows):
            gone = len(ref.rows) - len(claim.held)
            raise LeaseLostError(
                f"{gone} of {len(ref.rows)} rows of lease {ref.lease_id} were dropped or are "
                f"committed and cannot be read; release the rest and lease again"
            )
        found = [locate(row) for row in ref.rows]
        rows = [(self.ledger.group(number), sample) for number, sample in found]
        return self.payload.handout(ref.lease_id, rows, [*columns, *extra], list(extra))

    def inspect(self, now: float, ref: BatchRef) -> Claim:
        """What the lease still holds."""
        try:
            return self.ledger.inspect(now, ref)
        finally:
            self._follow(now)

    # Commit, release

    def commit(
        self,
        now: float,
        holder: Hashable,
        ref: BatchRef,
        written: Written | None,
        tokens: list[int],
        oldest: list[int],
        version: int | None,
    ) -> CommitResult:
        """See `DataStore.commit`."""
        if version is not None and version < 0:
            raise ConfigError(f"versions count from 0, got version={version}")
        task = self.ledger.task_of(ref.lease_id)
        if written is None and task is not None and not task.writes and self.log is None:
            claim = Claim(task, ())  # nothing to write: the commit itself looks at the rows
        else:
            claim = self.inspect(now, ref)
        segment = self._written(holder, claim, len(ref.rows), written)
        try:
            if segment is not None and written is not None:
                self.payload.agree(self.payload.layout_of(written.layout))
                for position in claim.held:
                    number, sample = locate(ref.rows[position])
                    group = self.ledger.group(number)
                    self.payload.record(group, sample, claim.task, segment, position)
            if self.log is not None:
                rows = [ref.rows[position] for position in claim.held]
                self.note_trained(claim.task, rows, version)
                place = None if segment is None else self.payload.describe(segment)
                record = history.commit_record(
                    claim, [self.ledger.key_of(row) for row in rows], place, tokens, oldest, version
                )
            result = self.ledger.commit(
                now,
                ref,
                tokens=dict(zip(ref.rows, tokens, strict=True)) if tokens else None,
                oldest={r: None if v < 0 else v for r, v in zip(ref.rows, oldest, strict=True)}
                if oldest
                else None,
            )
            self._follow(now)
            if self.log is not None and claim.held:
                self.log(record)
        finally:
            if segment is not None:
                self.payload.unref(segment, now)
        return result

    def _written(
        self, holder: Hashable, claim: Claim, rows: int, written: Written | None
    ) -> Segment | None:
        names = () if written is None else tuple(self.payload.layout_of(written.layout).positions)
        count = rows if written is None else written.rows
        if set(names) != set(claim.task.writes) or count != rows:
            raise DataError(
                f"a commit of {rows} rows by task {claim.task.name!r} writes "
                f"{sorted(claim.task.writes)}, got {count} rows of {sorted(names)}; "
                f"write exactly these columns, a row for each"
            )
        return None if written is None else self.payload.take(holder, written)

    def note_trained(self, task: TaskSpec, rows: Sequence[int], version: int | None) -> None:
        """A trainer is done with rows: they wait for a checkpoint."""
        if task.order is Order.STEP and version is not None:
            for row in rows:
                number, sample = locate(row)
                self.retained.trained(number, sample, version)

    def release(self, now: float, ref: BatchRef) -> None:
        """See `DataStore.release`."""
        self.ledger.release(now, ref)
        self._follow(now)

    def evict(self, now: float, requester: str) -> int:
        """See `SupportsEviction.evict`."""
        count = self.ledger.evict(now, requester)
        self._follow(now)
        return count

    def renew(self, now: float, leases: Sequence[int], lease_s: float) -> tuple[int, ...]:
        """See `DataStore.renew`."""
        lost = self.ledger.renew(now, leases, lease_s=lease_s)
        self._follow(now)
        return lost

    def drop(self, now: float, keys: Iterable[Key], reason: str) -> int:
        """See `DataStore.drop`."""
        keys = list(keys)
        count = self.ledger.drop(keys, reason=reason)
        self._follow(now)
        if count:
            self._log(["drop", [list(key) for key in keys], reason])
        return count

    def checkpoint(self, now: float, version: int) -> None:
        """See `SupportsDurability.checkpoint`."""
        for group in self.retained.checkpoint(version):
            self.payload.forget(group, now)
        self._log(["checkpoint", version])

    def restore(self, now: float, version: int) -> int:
        """See `SupportsDurability.restore`."""
        count = 0
        trainers = [task.name for task in self._tasks.values() if task.order is Order.STEP]
        for group, mask in self.retained.take_above(version):
            self.ledger.revive(group, mask, dict.fromkeys(trainers, 0))
            count += mask.bit_count()
        for group in self.ledger.groups():
            rows = [
                row_number(group.number, sample)
                for sample in self.retained.forget_above(group.number, version)
            ]
            for name in trainers if rows else ():
                count += self.ledger.undo(name, rows)
        self._follow(now)
        self._log(["restore", version])
        return count

    def advance(self, now: float) -> None:
        """Let time pass."""
        self.ledger.advance(now)
        self._follow(now)
        self.pool.sweep(now)

    def stats(self, drops_after: int) -> StoreStats:
        """What the ledger knows."""
        return self.ledger.stats(drops_after=drops_after)

    # Reading back what an earlier life wrote; see `history.py`

    def put_again(
        self,
        segment: Segment | None,
        keys: Sequence[GroupKey],
        admission: Admission,
        tokens: Sequence[int],
        oldest: Sequence[int],
        entries: Sequence[int],
    ) -> None:
        """Groups that were stored; without a segment, their payload is gone."""
        plan = self.payload.plan(admission.partition, self._tasks.values())
        intake = self.ledger.intake(admission)
        for key, brought, age, entry in zip(keys, tokens, oldest, entries, strict=True):
            place = self.payload.add_group(segment, entry, plan, admission.samples)
            intake.put(
                key,
                tokens=brought,
                oldest=None if age < 0 else age,
                place=place,
            )

    def commit_again(
        self,
        name: str,
        rows: Sequence[int],
        segment: Segment | None,
        entries: Sequence[int],
        tokens: Mapping[int, int],
        oldest: Mapping[int, int],
        version: int | None,
    ) -> None:
        """Rows that a task was done with."""
        task = self._tasks[name]
        if segment is not None:
            for row, entry in zip(rows, entries, strict=True):
                number, sample = locate(row)
                self.payload.record(self.ledger.group(number), sample, task, segment, entry)
        self.note_trained(task, rows, version)
        ages = {row: None if age < 0 else age for row, age in oldest.items()}
        self.ledger.redo(name, rows, tokens=tokens, oldest=ages)
        self._follow(0.0)

    def group_again(
        self, group: Group, done: Mapping[str, int], trained: Mapping[int, int]
    ) -> None:
        """A group of a snapshot: living, or kept for a checkpoint."""
        if group.alive:
            number = self.ledger.revive(group, group.alive, done).number
            if trained:
                self.retained.versions[number].update(trained)
        else:
            group.number = -len(self.retained.groups) - 1  # no living group has it
            self.retained.versions[group.number].update(trained)
            self.retained.groups[group.number] = group
        self._follow(0.0)

    def tasks(self) -> Iterable[TaskSpec]:
        """Registered ones."""
        return self._tasks.values()

    # Within

    def _log(self, record: list[Any]) -> None:
        if self.log is not None:
            self.log(record)

    def _follow(self, now: float) -> None:
        """Free what the ledger's last acts left without a reader."""
        effects = self.ledger.take_effects()
        self.ready |= effects.ready
        self.dropped |= effects.groups_dropped
        if not effects.gone:
            return
        self.room = True
        for group, mask in effects.gone:
            self._free(group, mask, now)

    def _free(self, group: Group, mask: int, now: float) -> None:
        if self.log is None:
            self.payload.forget(group, now, mask)
        elif not group.alive and not self.retained.keep(group):
            # What is kept for a checkpoint is kept by the group.
            self.payload.forget(group, now)
