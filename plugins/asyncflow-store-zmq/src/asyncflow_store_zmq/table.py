"""The store's state: the ledger, and where each row's columns lie. Pure: no I/O, `now` passed in.

    client: borrow an extent -> copy columns into it -> put(segment, keys, facts)
    client: lease -> matrix of rows and places -> copy columns out of shared memory

The controller process wraps this in sockets (`controller.py`); payload never passes through it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
from asyncflow_store_zmq.extents import Extent, ExtentPool, Segment
from asyncflow_store_zmq.layout import ColumnLayout, Layout
from asyncflow_store_zmq.places import ENTRY_BITS, NOWHERE, PlaceTable, entry_of, place_of
from asyncflow_store_zmq.retained import Retained

__all__ = ["FACTS", "Handout", "Incoming", "Table", "Written"]

FACTS = 8
"""Lines of a hand-out's matrix before the places: row, key (4), batch, tokens, oldest version."""
_PLAN_BITS = 10
_MAX_PLANS = 1 << _PLAN_BITS
_BY_RESPONSE = frozenset((*PER_TOKEN, "versions"))


class _Plan(NamedTuple):
    """Who writes what into a group, fixed when it is put."""

    writers: tuple[TaskSpec, ...]

    def run(self, samples: int) -> int:
        """Places beside the shared one."""
        return samples * len(self.writers)


class Written(NamedTuple):
    """Where a client says it wrote a segment."""

    shard: int
    slot: int
    start: int
    nbytes: int
    rows: int
    layout: bytes


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


class Handout(NamedTuple):
    """Rows with what a reader needs to find them.

    Attributes:
        lease_id: of the lease.
        rows: int64 [FACTS + sources, rows]; see `FACTS`; then the places of each source.
        sources: for each of the last lines of `rows`, the columns of the store that lie there.
        segments: int64 [segments, 8]: number, shard, slot, start, nbytes, rows, layout, generation.
        extra: columns among the sources that the task does not read: to check what it writes.
    """

    lease_id: int
    rows: NDArray[np.int64]
    sources: list[list[str]]
    segments: NDArray[np.int64]
    extra: list[str]


class Table:
    """Everything the controller knows.

    Attributes:
        ledger: rows, tasks, leases, credit.
        pool: memory.
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
        self.pool = ExtentPool(raise_generation)
        self._places = PlaceTable()
        self._segments: dict[int, Segment] = {}
        self._last_segment = 0
        self._layouts: list[Layout] = []
        self._layout_numbers: dict[bytes, int] = {}
        self._columns: dict[str, ColumnLayout] = {}
        self._tasks: dict[str, TaskSpec] = {}
        self._plans: list[_Plan] = []
        self._plan_of: dict[str, int] = {}  # by partition, until tasks change
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
            self._plan_of.clear()
            self._log(history.task_record(spec))

    def leave(self, name: str, now: float) -> None:
        """Take a member from a task."""
        if self.ledger.leave(name):
            self._tasks.pop(name, None)
            self._plan_of.clear()
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
        layout = self.layout_of(written.layout)
        if not len(keys) == len(tokens) == len(oldest) == written.rows:
            raise DataError(f"a put of {written.rows} rows came with {len(keys)} keys")
        self._agree(layout)
        if not all(map(self.ledger.known, keys)):
            self.ledger.check_admission(admission)
            self.ledger.fits(admission)
        return Incoming(keys, admission, tokens, oldest, self._take(holder, written))

    def advance_put(self, put: Incoming) -> bool:
        """Store groups as far as there is credit; True when all are dealt with."""
        ledger, segment, admission = self.ledger, put.segment, put.admission
        plan_number = self._plan(admission.partition)
        run = self._plans[plan_number].run(admission.samples)
        intake, first, entries = None, put.position, []
        for position in range(put.position, len(put.keys)):
            key = put.keys[position]
            if not ledger.known(key):
                if not ledger.fits(admission):
                    break
                if intake is None:
                    intake = ledger.intake(admission)
                start = self._places.add(place_of(segment.number, position), run)
                oldest = put.oldest[position]
                intake.put(
                    key,
                    tokens=put.tokens[position],
                    oldest=None if oldest < 0 else oldest,
                    place=start << _PLAN_BITS | plan_number,
                )
                segment.refs += 1
                put.stored += 1
                entries.append(position)
            put.position += 1
        if self.log is not None and entries:
            self.log(history.put_record(put, self.describe(segment), entries))
        self.ready |= ledger.take_effects().ready if put.position > first else set()
        return put.position == len(put.keys)

    def end_put(self, put: Incoming, now: float) -> None:
        """Let go of its memory: what no stored group needs is free."""
        self.unref(put.segment, now)

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
        return self._handout(grant.lease_id, rows, [*spec.reads, *extra], extra)

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
        return self._handout(ref.lease_id, rows, [*columns, *extra], list(extra))

    def inspect(self, now: float, ref: BatchRef) -> Claim:
        """What the lease still holds."""
        try:
            return self.ledger.inspect(now, ref)
        finally:
            self._follow(now)

    def _handout(
        self, lease_id: int, rows: list[tuple[Group, int]], names: list[str], extra: list[str]
    ) -> Handout:
        sources, where = self._sources(rows, names)
        values, columns = self._places.values, []
        for slot in where:
            if slot < 0:
                columns.append([values[group.place >> _PLAN_BITS] for group, _ in rows])
            else:
                columns.append([values[place(group, sample, slot)] for group, sample in rows])
        matrix = np.empty((FACTS + len(columns), len(rows)), np.int64)
        matrix[0] = [row_number(group.number, sample) for group, sample in rows]
        matrix[1:4] = np.array([group.key for group, _ in rows], np.int64).T
        matrix[4] = [sample for _, sample in rows]
        matrix[5] = [-1 if (b := g.admission.batch) is None else b for g, _ in rows]
        matrix[6] = [group.tokens[sample] for group, sample in rows]
        matrix[7] = [group.oldest[sample] for group, sample in rows]
        used: dict[int, None] = {}
        for number, column in enumerate(columns):
            matrix[FACTS + number] = column
            used.update(dict.fromkeys((matrix[FACTS + number] >> ENTRY_BITS).tolist()))
        segments = [self._segment_fields(number) for number in used]
        table = np.array(segments, np.int64).reshape(len(segments), 8)
        return Handout(lease_id, matrix, sources, table, extra)

    def _segment_fields(self, number: int) -> tuple[int, ...]:
        s = self._segments[number]
        return (
            number, s.extent.shard, s.extent.slot, s.start, s.nbytes, s.rows, s.layout,
            s.generation,
        )  # fmt: skip

    def _sources(
        self, rows: list[tuple[Group, int]], names: list[str]
    ) -> tuple[list[list[str]], list[int]]:
        """Columns that lie together, and the slot of each: -1 is shared, else the writer's."""
        signatures = {(group.place & (_MAX_PLANS - 1), group.admission.columns) for group, _ in rows}
        found: list[dict[int, list[str]]] = []
        for plan_number, shared in signatures:
            slots: dict[int, list[str]] = {}
            for name in names:
                slots.setdefault(self._slot(name, plan_number, shared), []).append(name)
            found.append(slots)
        if any(slots != found[0] for slots in found):
            raise DataError(
                f"rows of one lease have columns {names} from different writers; "
                f"use a partition for each kind of row"
            )
        return list(found[0].values()), list(found[0])

    def _slot(self, name: str, plan_number: int, shared: tuple[str, ...]) -> int:
        if name in shared:
            return -1
        for number, spec in enumerate(self._plans[plan_number].writers):
            if name in spec.writes:
                return number
        raise DataError(f"column {name!r} is written by no task that saw these rows")

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
            if segment is not None:
                self._agree(self._layouts[segment.layout])
                self.record(claim.task, ref.rows, claim.held, segment)
            if self.log is not None:
                rows = [ref.rows[position] for position in claim.held]
                self.note_trained(claim.task, rows, version)
                place = None if segment is None else self.describe(segment)
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
                self.unref(segment, now)
        return result

    def _written(
        self, holder: Hashable, claim: Claim, rows: int, written: Written | None
    ) -> Segment | None:
        names = () if written is None else tuple(self.layout_of(written.layout).positions)
        count = rows if written is None else written.rows
        if set(names) != set(claim.task.writes) or count != rows:
            raise DataError(
                f"a commit of {rows} rows by task {claim.task.name!r} writes "
                f"{sorted(claim.task.writes)}, got {count} rows of {sorted(names)}; "
                f"write exactly these columns, a row for each"
            )
        return None if written is None else self._take(holder, written)

    def record(
        self, task: TaskSpec, rows: Sequence[int], held: Iterable[int], segment: Segment
    ) -> None:
        """Note where the new columns of held rows lie."""
        values, number = self._places.values, segment.number
        for position in held:
            group_number, sample = locate(rows[position])
            group = self.ledger.group(group_number)
            values[self._own_place(group, sample, task)] = place_of(number, position)
            segment.refs += 1

    def note_trained(self, task: TaskSpec, rows: Sequence[int], version: int | None) -> None:
        """A trainer is done with rows: they wait for a checkpoint."""
        if task.order is Order.STEP and version is not None:
            for row in rows:
                number, sample = locate(row)
                self.retained.trained(number, sample, version)

    def describe(self, segment: Segment) -> list[Any]:
        """A segment for the log."""
        extent = segment.extent
        return [
            extent.shard, extent.slot, extent.units, segment.start, segment.nbytes, segment.rows,
            self._layouts[segment.layout].dump(),
        ]  # fmt: skip

    def _own_place(self, group: Group, sample: int, task: TaskSpec) -> int:
        plan = self._plans[group.place & (_MAX_PLANS - 1)]
        return place(group, sample, plan.writers.index(task))

    def release(self, now: float, ref: BatchRef) -> None:
        """See `DataStore.release`."""
        self.ledger.release(now, ref)
        self._follow(now)

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
            self._forget(group, now)
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

    def layout(self, number: int) -> bytes:
        """A layout by number."""
        if not 0 <= number < len(self._layouts):
            raise DataError(f"there is no layout {number}")
        return self._layouts[number].dump()

    # Reading back what an earlier life wrote; see `history.py`

    def take_again(self, place: list[Any]) -> Segment:
        """A segment as `describe` said; the caller holds one of its refs."""
        shard, slot, units, start, nbytes, rows, layout = place
        extent = self.pool.adopt(shard, slot, units)
        self._agree(self.layout_of(layout))
        return self._hold(extent, Written(shard, slot, start, nbytes, rows, layout))

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
        plan_number = self._plan(admission.partition)
        run = self._plans[plan_number].run(admission.samples)
        intake = self.ledger.intake(admission)
        for key, brought, age, entry in zip(keys, tokens, oldest, entries, strict=True):
            where = NOWHERE if segment is None else place_of(segment.number, entry)
            start = self._places.add(where, run)
            intake.put(
                key,
                tokens=brought,
                oldest=None if age < 0 else age,
                place=start << _PLAN_BITS | plan_number,
            )
            if segment is not None:
                segment.refs += 1

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
            values = self._places.values
            for row, entry in zip(rows, entries, strict=True):
                number, sample = locate(row)
                where = self._own_place(self.ledger.group(number), sample, task)
                if values[where] == NOWHERE:
                    values[where] = place_of(segment.number, entry)
                    segment.refs += 1
        self.note_trained(task, rows, version)
        ages = {row: None if age < 0 else age for row, age in oldest.items()}
        self.ledger.redo(name, rows, tokens=tokens, oldest=ages)
        self._follow(0.0)

    def place_again(self, writers: Sequence[str], places: Sequence[int]) -> int:
        """A group's run of places -> the group's `place`."""
        plan = _Plan(tuple(self._tasks[name] for name in writers))
        if plan not in self._plans:
            self._plans.append(plan)
        start = self._places.add(places[0], len(places) - 1)
        for position, value in enumerate(places[1:], start + 1):
            self._places.values[position] = value
        return start << _PLAN_BITS | self._plans.index(plan)

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

    def segments(self) -> Iterable[Segment]:
        """Living ones."""
        return self._segments.values()

    def places_of(self, group: Group) -> tuple[list[str], list[int]]:
        """Who writes into a group, and its run of places."""
        plan = self._plans[group.place & (_MAX_PLANS - 1)]
        start = group.place >> _PLAN_BITS
        end = start + 1 + plan.run(group.admission.samples)
        return [task.name for task in plan.writers], list(self._places.values[start:end])

    # Within

    def layout_of(self, data: bytes) -> Layout:
        """The layout of these bytes, read once."""
        number = self._layout_numbers.get(data)
        if number is None:
            layout = Layout.load(data)
            self._layout_numbers[data] = number = len(self._layouts)
            self._layouts.append(layout)
        return self._layouts[number]

    def _agree(self, layout: Layout) -> None:
        """Fix the form of new columns; `DataError` when one differs from its earlier rows."""
        for column in layout.columns:
            known = self._columns.setdefault(column.name, column)
            if known != column:
                raise DataError(
                    f"column {column.name!r} is {column}, but earlier rows are {known}; "
                    f"a column has one layout"
                )

    def _plan(self, partition: str) -> int:
        number = self._plan_of.get(partition)
        if number is None:
            writers = (t for t in self._tasks.values() if t.writes and partition in t.partitions)
            plan = _Plan(tuple(writers))
            if plan not in self._plans:
                self._plans.append(plan)
            number = self._plan_of[partition] = self._plans.index(plan)
        return number

    def _take(self, holder: Hashable, written: Written) -> Segment:
        """A segment that lives as long as its refs, one of which is the caller's."""
        extent = self.pool.find(
            holder, written.shard, written.slot, written.start, written.nbytes
        )
        return self._hold(extent, written)

    def _hold(self, extent: Extent, written: Written) -> Segment:
        self._last_segment += 1
        segment = Segment(
            self._last_segment,
            extent,
            written.start,
            written.nbytes,
            written.rows,
            self._layout_numbers[written.layout],
            1,
            self.pool.generation(extent),
        )
        self._segments[segment.number] = segment
        self.pool.born(segment)
        return segment

    def unref(self, segment: Segment, now: float) -> None:
        """One entry of a segment is needed no more."""
        segment.refs -= 1
        if not segment.refs:
            del self._segments[segment.number]
            self.pool.died(segment, now)

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
            self._forget(group, now, mask)
        elif not group.alive and not self.retained.keep(group):
            # What is kept for a checkpoint is kept by the group.
            self._forget(group, now)

    def _forget(self, group: Group, now: float, mask: int = -1) -> None:
        """Rows (default all) need their payload no more."""
        values, start = self._places.values, group.place >> _PLAN_BITS
        plan = self._plans[group.place & (_MAX_PLANS - 1)]
        samples = group.admission.samples
        mask &= (1 << samples) - 1
        for writer in range(len(plan.writers)):
            for sample in samples_in(mask):
                position = start + 1 + writer * samples + sample
                value = values[position]
                if value != NOWHERE:
                    values[position] = NOWHERE
                    self.unref(self._segments[entry_of(value)[0]], now)
        if not group.alive:
            if values[start] != NOWHERE:
                self.unref(self._segments[entry_of(values[start])[0]], now)
            self._places.free(start, plan.run(samples))


def place(group: Group, sample: int, slot: int) -> int:
    """Position in the table of places: of what the group shares (slot -1), or of a writer's."""
    start = group.place >> _PLAN_BITS
    return start if slot < 0 else start + 1 + slot * group.admission.samples + sample
