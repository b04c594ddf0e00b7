"""Where the columns of all rows lie: segments, layouts, the places of each block. Pure."""

from __future__ import annotations

import struct
from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncflow_core.errors import BackpressureError, DataError
from asyncflow_core.ledger import Block, row_number, runs_in
from asyncflow_core.services.data_store import TaskSpec
from asyncflow_store_zmq.extents import Extent, ExtentPool, Segment
from asyncflow_store_zmq.layout import ColumnLayout, Layout
from asyncflow_store_zmq.places import ENTRY_BITS, HEAD, NOWHERE, place_of

__all__ = ["FACTS", "SEGMENT", "Bulk", "Handout", "Payload", "Written", "lines_of"]

FACTS = 8
"""Lines of a hand-out's matrix before the places: row, key (4), batch, tokens, oldest version."""
SEGMENT = struct.Struct("<8q")
"""A segment of a hand-out."""
Bulk = bytes | NDArray[np.uint8]
"""Numbers in a message: inside its header, or, when they are many, in a frame of their own."""
_FRAME_BYTES = 1 << 20
_MAX_PLANS = 1024
_MAX_LAYOUTS = 4096


class _Plan(NamedTuple):
    """Who writes what into a block, fixed when it is put."""

    writers: tuple[TaskSpec, ...]


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
        lines: of `rows`.
        sources: for each of the last lines, the columns of the store that lie there.
        segments: for each of them number, shard, slot, start, nbytes, rows, layout, generation.
        extra: columns among the sources that the task does not read: to check what it writes.
        whole: groups come only whole.
    """

    lease_id: int
    lines: Bulk
    sources: list[list[str]]
    segments: Bulk
    extra: list[str]
    whole: bool

    @property
    def rows(self) -> NDArray[np.int64]:
        """int64 [FACTS + sources, rows]; see `FACTS`; then the places of each source."""
        return lines_of(self.lines, self.sources)


def lines_of(data: Bulk, sources: Sequence[list[str]]) -> NDArray[np.int64]:
    """`Handout.rows` of its lines."""
    return np.frombuffer(data, np.int64).reshape(FACTS + len(sources), -1)


class Payload:
    """Segments live as long as something refers to them.

    Attributes:
        pool: the memory they lie in.
    """

    def __init__(self, raise_generation: Callable[[int, int], int]) -> None:
        """Nothing written."""
        self.pool = ExtentPool(raise_generation)
        self._segments: dict[int, Segment] = {}
        self._last_segment = 0
        self._layouts: list[Layout] = []
        self._layout_numbers: dict[bytes, int] = {}
        self._columns: dict[str, ColumnLayout] = {}
        self._agreed: set[int] = set()
        self._known_sources: dict[tuple[Any, ...], dict[tuple[int, ...], list[str]]] = {}
        self._plans: list[_Plan] = []
        self._plan_of: dict[str, int] = {}  # by partition, until tasks change

    def tasks_changed(self) -> None:
        """Blocks put from now on have other writers."""
        self._plan_of.clear()

    def layout_of(self, data: bytes) -> Layout:
        """The layout of these bytes, read once."""
        number = self._layout_numbers.get(data)
        if number is None:
            if len(self._layouts) == _MAX_LAYOUTS:
                raise BackpressureError(
                    f"the store knows {_MAX_LAYOUTS} forms of batches and takes no further one; "
                    "write the same columns in the same order"
                )
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
        """Fix the form of new columns; `DataError` when one differs from its earlier rows.

        For rows that nothing keeps out any more: those that are refused have no say in it.
        """
        if id(layout) in self._agreed:  # of one of `_layouts`, which stay
            return
        for column in layout.columns:
            known = self._columns.get(column.name, column)
            if known != column:
                raise DataError(
                    f"column {column.name!r} is {column}, but earlier rows are {known}; "
                    f"a column has one layout"
                )
        self._columns.update((column.name, column) for column in layout.columns)
        self._agreed.add(id(layout))

    def plan(self, partition: str, tasks: Iterable[TaskSpec]) -> int:
        """Number of the plan of blocks put into a partition now."""
        number = self._plan_of.get(partition)
        if number is None:
            writers = (t for t in tasks if t.writes and partition in t.partitions)
            number = self._plan_of[partition] = self._numbered(writers)
        return number

    def _numbered(self, writers: Iterable[TaskSpec]) -> int:
        plan = _Plan(tuple(writers))
        if plan not in self._plans:
            if len(self._plans) == _MAX_PLANS:
                raise BackpressureError(
                    f"tasks were registered in more than {_MAX_PLANS} combinations; start a new "
                    f"store"
                )
            self._plans.append(plan)
        return self._plans.index(plan)

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

    def unref(self, segment: Segment, now: float, count: int = 1) -> None:
        """Some entries of a segment are needed no more."""
        segment.refs -= count
        if not segment.refs:
            del self._segments[segment.number]
            self.pool.died(segment, now)

    def segments(self) -> Iterable[Segment]:
        """Living ones."""
        return self._segments.values()

    def add_block(self, segment: Segment | None, entry: int, plan: int, groups: int) -> array[int]:
        """Places of a new block, whose groups lie in entries of a segment from one on."""
        where = NOWHERE
        if segment is not None:
            segment.refs += groups
            where = place_of(segment.number, entry)
        return array("q", (plan, where))

    def record(
        self, block: Block, first: int, last: int, task: TaskSpec, segment: Segment, entry: int
    ) -> None:
        """Note where a run of rows has the columns a task wrote, from an entry of a segment on.

        What is known already stays.
        """
        places: array[int] = block.place
        writers = self._plans[places[0]].writers
        if len(places) == HEAD:
            places.extend(_nowhere(block.rows * len(writers)))
        start = HEAD + writers.index(task) * block.rows
        place, count = place_of(segment.number, entry), last - first
        first, last = start + first, start + last
        known = places[first:last]
        missing = known.count(NOWHERE)
        segment.refs += missing
        if missing == count:
            places[first:last] = array("q", range(place, place + count))
        else:
            for position, value in enumerate(known):
                if value == NOWHERE:
                    places[first + position] = place + position

    def unwrite(self, block: Block, mask: int, task: TaskSpec, now: float) -> None:
        """Rows do not have what a task wrote any more."""
        places: array[int] = block.place
        writers = self._plans[places[0]].writers
        if task not in writers or len(places) == HEAD:
            return
        start = HEAD + writers.index(task) * block.rows
        for first, last in runs_in(mask):
            found = places[start + first : start + last]
            places[start + first : start + last] = _nowhere(last - first)
            self._unref_all(found, now)

    def forget(self, block: Block, mask: int, needed: int, now: float) -> None:
        """Rows need their payload no more; `needed` are the others of the block that do."""
        places: array[int] = block.place
        for start in range(HEAD, len(places), block.rows):
            for first, last in runs_in(mask):
                found = places[start + first : start + last]
                places[start + first : start + last] = _nowhere(last - first)
                self._unref_all(found, now)
        if places[1] != NOWHERE:
            groups = block.count_groups(mask) - block.count_groups(block.whole(mask) & needed)
            self.unref(self._segments[places[1] >> ENTRY_BITS], now, groups)

    def _unref_all(self, places: Iterable[int], now: float) -> None:
        numbers = Counter([place >> ENTRY_BITS for place in places])
        for number, count in numbers.items():
            if number != NOWHERE:  # which any shift leaves as it is
                self.unref(self._segments[number], now, count)

    def segments_of(self, block: Block, row: int) -> list[Segment]:
        """Where what was written of a row lies, also what its group shares."""
        places: array[int] = block.place
        found = [places[at + row] for at in range(HEAD, len(places), block.rows)]
        if places[1] != NOWHERE:
            found.append(places[1] + row // block.admission.samples)
        return [self._segments[place >> ENTRY_BITS] for place in found if place != NOWHERE]

    def place_again(self, writers: Iterable[TaskSpec], places: Sequence[int]) -> array[int]:
        """A block's places as `places_of` told them."""
        return array("q", (self._numbered(writers), *places))

    def places_of(self, block: Block) -> tuple[list[str], list[int]]:
        """Who writes into a block, and its places."""
        plan, *places = block.place
        return [task.name for task in self._plans[plan].writers], places

    def handout(
        self,
        lease_id: int,
        runs: list[tuple[Block, int, int]],
        names: list[str],
        extra: list[str],
        *,
        whole: bool,
    ) -> Handout:
        """Where some columns of some rows, given as runs, lie."""
        sources, kinds = self._sources(runs, names)
        lines = [array("q") for _ in range(FACTS + len(sources))]
        number, source, epoch, sequence, sample, batch, tokens, oldest, *columns = lines
        used: set[int] = set()
        for block, first, last in runs:
            count, rows = last - first, block.rows
            start = row_number(block.number, first)
            number.extend(range(start, start + count))
            source.extend(repeat(block.origin[0], count))
            epoch.extend(repeat(block.origin[1], count))
            samples = block.admission.samples
            if samples == 1:
                groups: Iterable[int] = range(first, last)
                sequence.extend(range(block.first + first, block.first + last))
                sample.extend(repeat(0, count))
            else:
                groups = [row // samples for row in range(first, last)]
                sequence.extend([block.first + group for group in groups])
                sample.extend([row % samples for row in range(first, last)])
            admitted = block.admission.batch
            batch.extend(repeat(-1 if admitted is None else admitted, count))
            tokens.extend(block.facts[first:last].tolist())
            oldest.extend(block.facts[rows + first : rows + last].tolist())
            places: array[int] = block.place
            kind = kinds[_kind(block)]
            for column, slots in zip(columns, sources, strict=True):
                slot = slots[kind]
                if slot >= 0:
                    start = HEAD + slot * rows
                    found = places[start + first : start + last]
                    column.extend(found)
                    used.update([place >> ENTRY_BITS for place in found])
                else:  # groups of a block lie in one segment
                    column.extend([places[1] + group for group in groups])
                    used.add(places[1] >> ENTRY_BITS)
        data = b"".join(lines)
        table = b"".join([self._segment_fields(number) for number in used])
        return Handout(lease_id, _bulk(data), list(sources.values()), _bulk(table), extra, whole)

    def _segment_fields(self, number: int) -> bytes:
        s = self._segments[number]
        return SEGMENT.pack(
            number, s.extent.shard, s.extent.slot, s.start, s.nbytes, s.rows, s.layout,
            s.generation,
        )  # fmt: skip

    def _sources(
        self, runs: list[tuple[Block, int, int]], names: list[str]
    ) -> tuple[dict[tuple[int, ...], list[str]], dict[tuple[int, tuple[str, ...]], int]]:
        """Columns that lie together, by their slot in each kind of block; and the kinds' numbers.

        Slot -1 is what a group shares, others are the writers'. Blocks differ in kind when they
        came with other columns, or when other tasks saw them.
        """
        kinds: dict[tuple[int, tuple[str, ...]], int] = {}
        for block, _, _ in runs:
            kinds.setdefault(_kind(block), len(kinds))
        asked = *kinds, *names
        sources = self._known_sources.get(asked)
        if sources is None:
            sources = {}
            for name in names:
                slots = tuple(self._slot(name, *kind) for kind in kinds)
                sources.setdefault(slots, []).append(name)
            if len(self._known_sources) >= _MAX_PLANS:
                self._known_sources.clear()
            self._known_sources[asked] = sources
        return sources, kinds

    def _slot(self, name: str, plan_number: int, shared: tuple[str, ...]) -> int:
        if name in shared:
            return -1
        for number, spec in enumerate(self._plans[plan_number].writers):
            if name in spec.writes:
                return number
        raise DataError(f"column {name!r} is written by no task that saw these rows")


def _kind(block: Block) -> tuple[int, tuple[str, ...]]:
    return block.place[0], block.admission.columns


def _bulk(data: bytes) -> Bulk:
    return data if len(data) < _FRAME_BYTES else np.frombuffer(data, np.uint8)


def _nowhere(count: int) -> array[int]:
    return array("q", (NOWHERE,)) * count
