"""The store's state: the ledger, and where each row's columns lie. Pure: no I/O, `now` passed in.

    client: borrow an extent -> copy columns into it -> put(segment, keys, facts)
    client: lease -> matrix of rows and places -> copy columns out of shared memory

The controller process wraps this in sockets (`controller.py`); payload never passes through it.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncflow_core.batch import BatchRef, Key
from asyncflow_core.errors import ConfigError, DataError, LeaseLostError
from asyncflow_core.ledger import (
    Admission,
    Block,
    Claim,
    LeasePolicy,
    Ledger,
    runs_in,
    runs_of,
    span,
)
from asyncflow_core.schema import PER_TOKEN
from asyncflow_core.services.data_store import CommitResult, Order, StoreStats, TaskSpec
from asyncflow_store_zmq import history
from asyncflow_store_zmq.calls import MAX_DROPS
from asyncflow_store_zmq.extents import Segment
from asyncflow_store_zmq.going_back import go_back
from asyncflow_store_zmq.incoming import Incoming, key_runs, stretches
from asyncflow_store_zmq.lineage import Lineage
from asyncflow_store_zmq.payload import Handout, Payload, Written
from asyncflow_store_zmq.retained import Retained

__all__ = ["Table"]

_BY_RESPONSE = frozenset((*PER_TOKEN, "versions"))


class Table:
    """Everything the controller knows.

    Attributes:
        ledger: rows, tasks, leases, credit.
        payload: where columns lie. pool: its memory.
        log: takes what must not be forgotten, in order, as plain lists; None forgets. Records are
            read back by `history.Replay`.
        retained: what waits for a checkpoint, where there is a log.
        lineage: which version generated what, where there is a log.
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
        remember_rows: int = 65536,
    ) -> None:
        """An empty store; the arguments are the ledger's and the pool's."""
        self.ledger = Ledger(
            capacity_rows=capacity_rows,
            capacity_bytes=capacity_bytes,
            max_staleness=max_staleness,
            max_gap_s=max_gap_s,
            policies=policies,
            first_lease=first_lease,
            remember_rows=remember_rows,
        )
        self.payload = Payload(raise_generation)
        self.pool = self.payload.pool
        self._tasks: dict[str, TaskSpec] = {}
        self.log: Callable[[list[Any]], None] | None = None
        self.retained = Retained()
        self.lineage = Lineage()
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
        self.follow(now)

    # Put

    def begin_put(
        self,
        holder: Hashable,
        written: Written,
        keys: NDArray[np.int64],
        admission: Admission,
        tokens: array[int],
        oldest: array[int],
    ) -> Incoming:
        """Check a put and take hold of its memory; `advance_put` stores its groups.

        Raises:
            DataError: see `DataStore.put`.
            BackpressureError: a group is larger than the whole store.
        """
        layout = self.payload.layout_of(written.layout)
        if keys.shape != (written.rows, 3) or not len(keys) == len(tokens) == len(oldest):
            raise DataError(
                f"a put of {written.rows} groups came with keys of shape {keys.shape}, "
                f"{len(tokens)} and {len(oldest)} facts"
            )
        left = deque(key_runs(keys))
        known = self.ledger.known_keys()
        if any(next(known.unknown_in(key, count), None) for _, key, count in left):
            self.ledger.intake(admission)
            self.ledger.fits(admission)
            self.payload.agree(layout)
        segment = self.payload.take(holder, written)
        return Incoming(keys, admission, tokens, oldest, segment, left)

    def advance_put(self, put: Incoming) -> bool:
        """Store groups as far as there is credit; True when all are dealt with."""
        ledger, admission = self.ledger, put.admission
        plan = self.payload.plan(admission.partition, self._tasks.values())
        known = ledger.known_keys()
        intake, stored = None, []
        while put.left:
            entry, key, count = put.left.popleft()
            new = next(known.unknown_in(key, count), None)
            if new is None:
                continue
            room = ledger.room(admission)
            intake = intake or ledger.intake(admission)
            first = new[0]
            last = min(new[1], first + min(room, intake.most))
            start = entry + first - key.sequence
            end = start + last - first
            if start < end:
                place = self.payload.add_block(put.segment, start, plan, end - start)
                begin = key._replace(sequence=first)
                intake.put(begin, put.tokens[start:end], put.oldest[start:end], place)
                stored.append((start, end))
            rest = key.sequence + count - last
            if rest:
                put.left.appendleft((end, key._replace(sequence=last), rest))
            if start == end:
                break
        if stored:
            put.stored += sum(end - start for start, end in stored)
            if self.log is not None:
                self.log(history.put_record(put, self.payload.describe(put.segment), stored))
            self.ready |= ledger.take_effects().ready
        return not put.left

    def end_put(self, put: Incoming, now: float) -> None:
        """Let go of its memory: what no stored group needs is free."""
        self.payload.unref(put.segment, now)

    # Lease and read

    def lease(self, now: float, task: str, requester: str, **how: Any) -> Handout | None:
        """Hand out ready rows; None when there are none now."""
        grant = self.ledger.grant(now, task, requester=requester, **how)
        self.follow(now)
        if grant is None:
            return None
        spec = grant.task
        extra = []
        if "response_ids" not in spec.reads + spec.writes and _BY_RESPONSE & set(spec.writes):
            extra = ["response_ids"]  # its lengths check what will be written
        runs = [
            (block, first, last) for block, mask in grant.picks for first, last in runs_in(mask)
        ]
        names = [*spec.reads, *extra]
        return self.payload.handout(grant.lease_id, runs, names, extra, whole=spec.whole_groups)

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
        runs = [(self.ledger.block(n), first, last) for n, first, last in runs_of(ref.rows)]
        names = [*columns, *extra]
        whole = claim.task.whole_groups
        return self.payload.handout(ref.lease_id, runs, names, list(extra), whole=whole)

    def inspect(self, now: float, ref: BatchRef) -> Claim:
        """What the lease still holds."""
        try:
            return self.ledger.inspect(now, ref)
        finally:
            self.follow(now)

    # Commit, release

    def commit(
        self,
        now: float,
        holder: Hashable,
        ref: BatchRef,
        written: Written | None,
        tokens: Sequence[int],
        oldest: Sequence[int],
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
        segment = self._written(holder, claim, len(ref.rows), written, tokens, oldest)
        try:
            rows: Sequence[int] = ()
            if segment is not None or self.log is not None:
                rows = [ref.rows[position] for position in claim.held]
            if segment is not None and written is not None:
                self.payload.agree(self.payload.layout_of(written.layout))
                self.record(claim.task, rows, claim.held, segment)
            if self.log is not None:
                self.note_trained(claim.task, rows, version)
                self.note_generated(
                    claim.task, rows, [tokens[p] for p in claim.held] if tokens else [], version
                )
                place = None if segment is None else self.payload.describe(segment)
                record = history.commit_record(
                    claim, self._keys_of(rows), place, tokens, oldest, version
                )
            result = self.ledger.commit(now, ref, tokens=tokens, oldest=oldest)
            self.follow(now)
            if self.log is not None and claim.held:
                self.log(record)
        finally:
            if segment is not None:
                self.payload.unref(segment, now)
        return result

    def record(
        self, task: TaskSpec, rows: Sequence[int], entries: Sequence[int], segment: Segment
    ) -> None:
        """Rows have columns at entries of a segment, one for each."""
        for number, first, last, entry in stretches(rows, entries):
            self.payload.record(self.ledger.block(number), first, last, task, segment, entry)

    def _keys_of(self, rows: Sequence[int]) -> list[tuple[int, int, int, int]]:
        return [
            key
            for number, first, last in runs_of(rows)
            for key in self.ledger.block(number).keys(first, last)
        ]

    def _written(
        self,
        holder: Hashable,
        claim: Claim,
        rows: int,
        written: Written | None,
        tokens: Sequence[int],
        oldest: Sequence[int],
    ) -> Segment | None:
        for facts in (tokens, oldest):
            if facts and len(facts) != rows:
                raise DataError(f"a commit of {rows} rows came with {len(facts)} facts")
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
        if task.order is Order.STEP and not task.writes and version is not None:
            for number, first, last in runs_of(rows):
                self.retained.note(number, span(first, last), version)

    def note_generated(
        self, task: TaskSpec, rows: Sequence[int], tokens: Sequence[int], version: int | None
    ) -> None:
        """Rows have responses, whose newest token is of `version`."""
        if task.order is not Order.ADMITTED or version is None or not tokens:
            return
        done = 0
        for number, first, last in runs_of(rows):
            brought = tokens[done : done + last - first]
            self.lineage.note(self.ledger.block(number), first, brought, version)
            done += last - first

    def release(self, now: float, ref: BatchRef) -> None:
        """See `DataStore.release`."""
        self.ledger.release(now, ref)
        self.follow(now)

    def evict(self, now: float, requester: str) -> int:
        """See `SupportsEviction.evict`."""
        count = self.ledger.evict(now, requester)
        self.follow(now)
        return count

    def renew(self, now: float, leases: Sequence[int], lease_s: float) -> tuple[int, ...]:
        """See `DataStore.renew`."""
        lost = self.ledger.renew(now, leases, lease_s=lease_s)
        self.follow(now)
        return lost

    def drop(self, now: float, keys: Iterable[Key], reason: str) -> int:
        """See `DataStore.drop`."""
        keys = list(keys)
        count = self.ledger.drop(keys, reason=reason)
        self.follow(now)
        if count:
            self._log(["drop", [list(key) for key in keys], reason])
        return count

    def checkpoint(self, now: float, version: int) -> None:
        """See `SupportsDurability.checkpoint`."""
        for block, rows, kept in self.retained.checkpoint(version):
            self._forget(block, rows, block.alive | kept, now)
        self._log(["checkpoint", version])

    def restore(self, now: float, version: int) -> int:
        """See `SupportsDurability.restore`."""
        count = go_back(self, version, now)
        self.follow(now)
        self._log(["restore", version])
        return count

    def advance(self, now: float) -> None:
        """Let time pass."""
        self.ledger.advance(now)
        self.follow(now)
        self.pool.sweep(now)

    def stats(self, drops_after: int) -> StoreStats:
        """What the ledger knows; of dropped groups as many as an answer takes."""
        return self.ledger.stats(drops_after=drops_after, most_drops=MAX_DROPS)

    # For what reads it, and reads it back

    def tasks(self) -> Iterable[TaskSpec]:
        """Registered ones."""
        return self._tasks.values()

    def task(self, name: str) -> TaskSpec:
        """A registered one."""
        return self._tasks[name]

    def follow(self, now: float) -> None:
        """Free what the ledger's last acts left without a reader."""
        effects = self.ledger.take_effects()
        self.ready |= effects.ready
        self.dropped |= effects.groups_dropped
        if not effects.gone:
            return
        self.room = True
        gone: dict[Block, int] = {}
        for block, mask in effects.gone:
            gone[block] = gone.get(block, 0) | mask
        for block, mask in gone.items():
            kept = 0 if self.log is None else self.retained.keep(block, mask)
            needed = block.alive | self.retained.rows_of(block.number)
            if mask & ~kept:
                self._forget(block, mask & ~kept, needed, now)

    # Within

    def _log(self, record: list[Any]) -> None:
        if self.log is not None:
            self.log(record)

    def _forget(self, block: Block, mask: int, needed: int, now: float) -> None:
        self.payload.forget(block, mask, needed, now)
        if not needed:
            self.lineage.forget(block.number)
