"""Where the columns of all rows lie: segments, layouts, the places of each group. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncflow_core.errors import DataError
from asyncflow_core.ledger import Group, row_number, samples_in
from asyncflow_core.services.data_store import TaskSpec
from asyncflow_store_zmq.extents import Extent, ExtentPool, Segment
from asyncflow_store_zmq.layout import ColumnLayout, Layout
from asyncflow_store_zmq.places import ENTRY_BITS, NOWHERE, PlaceTable, entry_of, place_of

__all__ = ["FACTS", "Handout", "Payload", "Written"]

FACTS = 8
"""Lines of a hand-out's matrix before the places: row, key (4), batch, tokens, oldest version."""
_PLAN_BITS = 10
_MAX_PLANS = 1 << _PLAN_BITS


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


class Payload:
    """Segments live as long as something refers to them.

    Attributes:
        pool: the memory they lie in.
    """

    def __init__(self, raise_generation: Callable[[int, int], int]) -> None:
        """Nothing written."""
        self.pool = ExtentPool(raise_generation)
        self._places = PlaceTable()
        self._segments: dict[int, Segment] = {}
        self._last_segment = 0
        self._layouts: list[Layout] = []
        self._layout_numbers: dict[bytes, int] = {}
        self._columns: dict[str, ColumnLayout] = {}
        self._plans: list[_Plan] = []
        self._plan_of: dict[str, int] = {}  # by partition, until tasks change

    def tasks_changed(self) -> None:
        """Groups put from now on have other writers."""
        self._plan_of.clear()

    def layout_of(self, data: bytes) -> Layout:
        """The layout of these bytes, read once."""
        number = self._layout_numbers.get(data)
        if number is None:
            layout = Layout.load(data)
            self._layout_numbers[data] = number = len(self._layouts)
            self._layouts.append(layout)
        return self._layouts[number]

    def layout(self, number: int) -> bytes:
        """A layout by number."""
        if not 0 <= number < len(self._layouts):
            raise DataError(f"there is no layout {number}")
        return self._layouts[number].dump()

    def agree(self, layout: Layout) -> None:
        """Fix the form of new columns; `DataError` when one differs from its earlier rows."""
        for column in layout.columns:
            known = self._columns.setdefault(column.name, column)
            if known != column:
                raise DataError(
                    f"column {column.name!r} is {column}, but earlier rows are {known}; "
                    f"a column has one layout"
                )

    def plan(self, partition: str, tasks: Iterable[TaskSpec]) -> int:
        """Number of the plan of groups put into a partition now."""
        number = self._plan_of.get(partition)
        if number is None:
            writers = (t for t in tasks if t.writes and partition in t.partitions)
            plan = _Plan(tuple(writers))
            if plan not in self._plans:
                self._plans.append(plan)
            number = self._plan_of[partition] = self._plans.index(plan)
        return number

    def take(self, holder: Hashable, written: Written) -> Segment:
        """A segment that lives as long as its refs, one of which is the caller's."""
        extent = self.pool.find(holder, written.shard, written.slot, written.start, written.nbytes)
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

    def take_again(self, place: list[Any]) -> Segment:
        """A segment as `describe` said; the caller holds one of its refs."""
        shard, slot, units, start, nbytes, rows, layout = place
        extent = self.pool.adopt(shard, slot, units)
        self.agree(self.layout_of(layout))
        return self._hold(extent, Written(shard, slot, start, nbytes, rows, layout))

    def describe(self, segment: Segment) -> list[Any]:
        """A segment for the log."""
        extent = segment.extent
        return [
            extent.shard, extent.slot, extent.units, segment.start, segment.nbytes, segment.rows,
            self._layouts[segment.layout].dump(),
        ]  # fmt: skip

    def unref(self, segment: Segment, now: float) -> None:
        """One entry of a segment is needed no more."""
        segment.refs -= 1
        if not segment.refs:
            del self._segments[segment.number]
            self.pool.died(segment, now)

    def segments(self) -> Iterable[Segment]:
        """Living ones."""
        return self._segments.values()

    def add_group(self, segment: Segment | None, entry: int, plan: int, samples: int) -> int:
        """Room for a new group, whose rows share an entry of a segment -> the group's `place`."""
        where = NOWHERE
        if segment is not None:
            segment.refs += 1
            where = place_of(segment.number, entry)
        return self._places.add(where, self._plans[plan].run(samples)) << _PLAN_BITS | plan

    def record(
        self, group: Group, sample: int, task: TaskSpec, segment: Segment, entry: int
    ) -> None:
        """Note where a row's own columns lie that a task wrote; what is known already stays."""
        plan = self._plans[group.place & (_MAX_PLANS - 1)]
        position = _position(group, sample, plan.writers.index(task))
        if self._places.values[position] == NOWHERE:
            self._places.values[position] = place_of(segment.number, entry)
            segment.refs += 1

    def forget(self, group: Group, now: float, mask: int = -1) -> None:
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

    def place_again(self, writers: Sequence[TaskSpec], places: Sequence[int]) -> int:
        """A group's run of places -> the group's `place`."""
        plan = _Plan(tuple(writers))
        if plan not in self._plans:
            self._plans.append(plan)
        start = self._places.add(places[0], len(places) - 1)
        for position, value in enumerate(places[1:], start + 1):
            self._places.values[position] = value
        return start << _PLAN_BITS | self._plans.index(plan)

    def places_of(self, group: Group) -> tuple[list[str], list[int]]:
        """Who writes into a group, and its run of places."""
        plan = self._plans[group.place & (_MAX_PLANS - 1)]
        start = group.place >> _PLAN_BITS
        end = start + 1 + plan.run(group.admission.samples)
        return [task.name for task in plan.writers], list(self._places.values[start:end])

    def handout(
        self, lease_id: int, rows: list[tuple[Group, int]], names: list[str], extra: list[str]
    ) -> Handout:
        """Where some columns of some rows lie."""
        sources, kinds = self._sources(rows, names)
        values, columns = self._places.values, []
        for slots in sources:
            if slots == (-1,):
                columns.append([values[group.place >> _PLAN_BITS] for group, _ in rows])
            elif len(slots) == 1:
                columns.append([values[_position(g, sample, slots[0])] for g, sample in rows])
            else:
                columns.append([values[_position(g, s, slots[kinds[_kind(g)]])] for g, s in rows])
        matrix = np.empty((FACTS + len(columns), len(rows)), np.int64)
        matrix[0] = [row_number(group.number, sample) for group, sample in rows]
        matrix[1:4] = np.array([group.key for group, _ in rows], np.int64).T
        matrix[4] = [sample for _, sample in rows]
        matrix[5] = [-1 if (b := g.admission.batch) is None else b for g, _ in rows]
        matrix[6] = [group.facts[sample] for group, sample in rows]
        matrix[7] = [group.facts[sample - group.admission.samples] for group, sample in rows]
        used: dict[int, None] = {}
        for number, column in enumerate(columns):
            matrix[FACTS + number] = column
            used.update(dict.fromkeys((matrix[FACTS + number] >> ENTRY_BITS).tolist()))
        segments = [self._segment_fields(number) for number in used]
        table = np.array(segments, np.int64).reshape(len(segments), 8)
        return Handout(lease_id, matrix, list(sources.values()), table, extra)

    def _segment_fields(self, number: int) -> tuple[int, ...]:
        s = self._segments[number]
        return (
            number, s.extent.shard, s.extent.slot, s.start, s.nbytes, s.rows, s.layout,
            s.generation,
        )  # fmt: skip

    def _sources(
        self, rows: list[tuple[Group, int]], names: list[str]
    ) -> tuple[dict[tuple[int, ...], list[str]], dict[tuple[int, tuple[str, ...]], int]]:
        """Columns that lie together, by their slot in each kind of group; and the kinds' numbers.

        Slot -1 is what a group shares, others are the writers'. Groups differ in kind when they
        came with other columns, or when other tasks saw them.
        """
        kinds: dict[tuple[int, tuple[str, ...]], int] = {}
        for group, _ in rows:
            kinds.setdefault(_kind(group), len(kinds))
        sources: dict[tuple[int, ...], list[str]] = {}
        for name in names:
            slots = tuple(self._slot(name, *kind) for kind in kinds)
            sources.setdefault(slots, []).append(name)
        return sources, kinds

    def _slot(self, name: str, plan_number: int, shared: tuple[str, ...]) -> int:
        if name in shared:
            return -1
        for number, spec in enumerate(self._plans[plan_number].writers):
            if name in spec.writes:
                return number
        raise DataError(f"column {name!r} is written by no task that saw these rows")


def _kind(group: Group) -> tuple[int, tuple[str, ...]]:
    return group.place & (_MAX_PLANS - 1), group.admission.columns


def _position(group: Group, sample: int, slot: int) -> int:
    """In the table of places: of what the group shares (slot -1), or of a writer's columns."""
    start = group.place >> _PLAN_BITS
    return start if slot < 0 else start + 1 + slot * group.admission.samples + sample
