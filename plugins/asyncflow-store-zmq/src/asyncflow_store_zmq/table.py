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
from asyncflow_core.services.data_store import CommitResult, StoreStats, TaskSpec
from asyncflow_store_zmq.extents import ExtentPool, Segment
from asyncflow_store_zmq.layout import ColumnLayout, Layout
from asyncflow_store_zmq.places import NOWHERE, PlaceTable, entry_of, place_of

__all__ = ["FACTS", "Handout", "Incoming", "Table", "Written"]

FACTS = 8
"""Columns of a hand-out's matrix before the places: row, key (4), batch, tokens, oldest version."""
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
        rows: int64 [rows, FACTS + sources]; see `FACTS`; then a place for each source.
        sources: for each of the last columns of `rows`, the columns of the store that lie there.
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
        self.ready: set[str] = set()
        self.room = False
        self.dropped = False

    # Tasks

    def register(self, spec: TaskSpec) -> None:
        """See `DataStore.register`."""
        self.ledger.register(spec)
        self._tasks[spec.name] = spec
        self._plan_of.clear()

    def leave(self, name: str, now: float) -> None:
        """Take a member from a task."""
        if self.ledger.leave(name):
            self._tasks.pop(name, None)
            self._plan_of.clear()
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
        layout = self._layout(written.layout)
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
        for position in range(put.position, len(put.keys)):
            key = put.keys[position]
            if ledger.known(key):
                put.position += 1
                continue
            if not ledger.fits(admission):
                return False
            start = self._places.add(place_of(segment.number, position), run)
            oldest = put.oldest[position]
            ledger.put(
                key,
                admission,
                tokens=put.tokens[position],
                oldest=None if oldest < 0 else oldest,
                place=start << _PLAN_BITS | plan_number,
            )
            segment.refs += 1
            put.position += 1
            put.stored += 1
        self._collect_ready()
        return True

    def end_put(self, put: Incoming, now: float) -> None:
        """Let go of its memory: what no stored group needs is free."""
        self._collect_ready()
        self._unref(put.segment, now)

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
            columns.append([values[place(group, sample, slot)] for group, sample in rows])
        facts = [
            (
                row_number(group.number, sample),
                *group.key,
                sample,
                -1 if group.admission.batch is None else group.admission.batch,
                group.tokens[sample],
                group.oldest[sample],
            )
            for group, sample in rows
        ]
        matrix = np.empty((len(rows), FACTS + len(columns)), np.int64)
        matrix[:, :FACTS] = facts
        used: dict[int, None] = {}
        for number, column in enumerate(columns):
            matrix[:, FACTS + number] = column
            used.update(dict.fromkeys(entry_of(value)[0] for value in column))
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
    ) -> tuple[CommitResult, Claim, Segment | None]:
        """See `DataStore.commit`; also what it was about, for the journal."""
        claim = self.inspect(now, ref)
        if version is not None and version < 0:
            raise ConfigError(f"versions count from 0, got version={version}")
        segment = self._written(holder, claim, len(ref.rows), written)
        try:
            if segment is not None:
                self._agree(self._layouts[segment.layout])
                self._record(claim, ref.rows, segment)
            result = self.ledger.commit(
                now,
                ref,
                tokens=dict(zip(ref.rows, tokens, strict=True)) if tokens else None,
                oldest={r: None if v < 0 else v for r, v in zip(ref.rows, oldest, strict=True)}
                if oldest
                else None,
            )
            self._follow(now)
        finally:
            if segment is not None:
                self._unref(segment, now)
        return result, claim, segment

    def _written(
        self, holder: Hashable, claim: Claim, rows: int, written: Written | None
    ) -> Segment | None:
        names = () if written is None else tuple(self._layout(written.layout).positions)
        count = rows if written is None else written.rows
        if set(names) != set(claim.task.writes) or count != rows:
            raise DataError(
                f"a commit of {rows} rows by task {claim.task.name!r} writes "
                f"{sorted(claim.task.writes)}, got {count} rows of {sorted(names)}; "
                f"write exactly these columns, a row for each"
            )
        return None if written is None else self._take(holder, written)

    def _record(self, claim: Claim, rows: Sequence[int], segment: Segment) -> None:
        """Note where the held rows' new columns lie."""
        values, number = self._places.values, segment.number
        for position in claim.held:
            group_number, sample = locate(rows[position])
            group = self.ledger.group(group_number)
            values[self._own_place(group, sample, claim.task)] = place_of(number, position)
            segment.refs += 1

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
        count = self.ledger.drop(keys, reason=reason)
        self._follow(now)
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

    # Within

    def _layout(self, data: bytes) -> Layout:
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

    def _unref(self, segment: Segment, now: float) -> None:
        segment.refs -= 1
        if not segment.refs:
            del self._segments[segment.number]
            self.pool.died(segment, now)

    def _collect_ready(self) -> None:
        effects = self.ledger.take_effects()
        self.ready |= effects.ready

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
        values, start = self._places.values, group.place >> _PLAN_BITS
        plan = self._plans[group.place & (_MAX_PLANS - 1)]
        samples = group.admission.samples
        for writer in range(len(plan.writers)):
            for sample in samples_in(mask):
                position = start + 1 + writer * samples + sample
                value = values[position]
                if value != NOWHERE:
                    values[position] = NOWHERE
                    self._unref(self._segments[entry_of(value)[0]], now)
        if not group.alive:
            self._unref(self._segments[entry_of(values[start])[0]], now)
            self._places.free(start, plan.run(samples))


def place(group: Group, sample: int, slot: int) -> int:
    """Position in the table of places: of what the group shares (slot -1), or of a writer's."""
    start = group.place >> _PLAN_BITS
    return start if slot < 0 else start + 1 + slot * group.admission.samples + sample
