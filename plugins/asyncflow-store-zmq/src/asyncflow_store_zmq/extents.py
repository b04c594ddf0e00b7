"""Which memory is lent to whom, and what lives in it. Pure: nothing here touches memory.

An *extent* is a run of MiB units in one shard's arena. A writer borrows one, fills it from the
start with segments, and seals it when the next does not fit. It comes back when it is sealed and
no segment in it lives. So a put needs no word with the shard: its memory was lent beforehand.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncflow_core.errors import BackpressureError, DataError
from asyncflow_store_zmq.arena import ARENA_BYTES, UNIT

__all__ = ["LARGE_BYTES", "LENT_BYTES", "Extent", "ExtentPool", "Hole", "Segment"]

LENT_BYTES = 4 * UNIT
"""What a writer gets at a time, at least."""
LARGE_BYTES = 8 * LENT_BYTES
"""What a writer of large batches gets, and asks for ahead."""
_WARM_BYTES = 3 * LARGE_BYTES
_GRACE_S = 5.0
_CAUTION_S = 20.0
"""A client that does not know yet that the controller died may write for so long into what it was
lent before: longer than a silent peer is believed to live."""


class Hole(NamedTuple):
    """A range whose pages can be given back."""

    shard: int
    start: int
    nbytes: int


@dataclass(slots=True, eq=False)
class Extent:
    """A run of units.

    Attributes:
        shard: whose arena.
        slot: first unit; unit 0 is the arena's table.
        units: how many.
        holder: who may write into it; None when it is sealed or free.
        segments: that live in it.
        warm: it is free and keeps its pages for the next writer.
        dead: ranges of dead segments that still have their pages, with the time of death.
    """

    shard: int
    slot: int
    units: int
    holder: Hashable = None
    segments: int = 0
    warm: bool = False
    dead: list[tuple[float, int, int]] = field(default_factory=list)

    @property
    def start(self) -> int:
        """First byte."""
        return self.slot * UNIT

    @property
    def nbytes(self) -> int:
        """Size."""
        return self.units * UNIT


@dataclass(slots=True, eq=False)
class Segment:
    """What one call wrote.

    Attributes:
        number: of the segment in the store, never used again.
        extent: where it lies.
        start: first byte in the arena.
        nbytes: size.
        rows: rows it was written with.
        layout: number of its layout.
        refs: entries of it that living rows need.
        generation: of the extent as it was lent for it.
    """

    number: int
    extent: Extent
    start: int
    nbytes: int
    rows: int
    layout: int
    refs: int
    generation: int


class ExtentPool:
    """Lends extents, and takes them back.

    Attributes:
        nbytes: of living segments.
        holes: ranges to give back, for the shell to carry out.
        waits: dead segments keep their memory until `bury`, once a disk knows of their death.
    """

    def __init__(self, raise_generation: Callable[[int, int], int]) -> None:
        """A pool without shards; `raise_generation` takes shard and slot, returns the new one."""
        self._raise = raise_generation
        self._tops: list[int] = []  # by shard, first unit never lent
        self._free: dict[int, list[Extent]] = defaultdict(list)  # by units
        self._lent: dict[tuple[int, int], Extent] = {}
        self._held: dict[Hashable, set[Extent]] = defaultdict(set)
        self._generations: dict[tuple[int, int], int] = {}
        self._dying: dict[Extent, None] = {}  # sealed, with dead pages, oldest first
        self._warm_bytes = 0
        self._replaying = False
        # Since a restart: what came free, and when it may be lent; None: nothing is held back.
        self._aside: list[Extent] | None = None
        self._lent_again_at: float | None = None
        self.nbytes = 0
        self.holes: list[Hole] = []
        self.waits = False
        self._unburied: list[tuple[Segment, float]] = []

    def add_shard(self) -> None:
        """One more arena, empty."""
        self._tops.append(1)

    def lend(self, holder: Hashable, nbytes: int) -> Extent:
        """Memory for at least `nbytes`, in one piece.

        Raises:
            BackpressureError: more than an arena has.
        """
        units = max(LENT_BYTES, 1 << max(0, nbytes - 1).bit_length()) // UNIT
        free = self._free[units]
        if free and self._aside is None:
            extent = free.pop()
            self._warm_bytes -= extent.nbytes if extent.warm else 0
        else:
            extent = self._fresh(units, nbytes)
        extent.holder = holder
        place = extent.shard, extent.slot
        self._lent[place] = extent
        self._held[holder].add(extent)
        self._generations[place] = self._raise(*place)
        return extent

    def _fresh(self, units: int, nbytes: int) -> Extent:
        shard = min(range(len(self._tops)), key=self._tops.__getitem__)
        slot = self._tops[shard]
        if (slot + units) * UNIT > ARENA_BYTES:
            raise BackpressureError(f"no shard has room for {nbytes} bytes in one piece")
        self._tops[shard] += units
        return Extent(shard, slot, units)

    def begin_replay(self, tops: Sequence[int] = ()) -> None:
        """What an earlier life wrote is told again; until `end_replay` no memory comes free.

        Args:
            tops: by shard, first unit never lent by any life, as far as is known. What lies below
                is lent again only some time after: clients of the earlier life may live.
        """
        self._replaying = True
        for shard, top in enumerate(tops):
            self._tops[shard] = max(self._tops[shard], top)
        self._aside = []

    def end_replay(self) -> None:
        """Whatever turned out to be unused is free."""
        self._replaying = False
        gaps = self._gaps()
        for extent in list(self._lent.values()):
            self._settle(extent)
        for extent in gaps:
            self._put_aside(extent)

    def _gaps(self) -> list[Extent]:
        """Below the tops, what no segment lies in, cut into pieces of the sizes that are lent."""
        found = []
        for shard, top in enumerate(self._tops):
            here = sorted((e.slot, e.units) for e in self._lent.values() if e.shard == shard)
            at = 1
            for slot, units in [*here, (top, 0)]:
                while slot - at >= LENT_BYTES // UNIT:
                    piece = 1 << (slot - at).bit_length() - 1
                    found.append(Extent(shard, at, piece))
                    at += piece
                at = slot + units
        return found

    def adopt(self, shard: int, slot: int, units: int) -> Extent:
        """An extent of an earlier life, sealed; the same one for the same place."""
        extent = self._lent.get((shard, slot))
        if extent is None:
            extent = self._lent[shard, slot] = Extent(shard, slot, units)
            self._generations[shard, slot] = self._raise(shard, slot)
            self._tops[shard] = max(self._tops[shard], slot + units)
        return extent

    def find(self, holder: Hashable, shard: int, slot: int, start: int, nbytes: int) -> Extent:
        """The extent a holder wrote to; `DataError` when it may not."""
        extent = self._lent.get((shard, slot))
        if extent is None or extent.holder != holder:
            raise DataError(f"memory at shard {shard}, unit {slot} is not lent to this client")
        if not extent.start <= start <= start + nbytes <= extent.start + extent.nbytes:
            raise DataError(f"{nbytes} bytes at {start} lie outside the memory lent at unit {slot}")
        return extent

    def generation(self, extent: Extent) -> int:
        """Of a lent extent."""
        return self._generations[extent.shard, extent.slot]

    def seal(self, extent: Extent) -> None:
        """Its holder writes no more into it."""
        if extent.holder is not None:
            self._held[extent.holder].discard(extent)
            extent.holder = None
            self._settle(extent)

    def seal_all(self, holder: Hashable) -> None:
        """A holder is gone."""
        for extent in self._held.pop(holder, set()):
            extent.holder = None
            self._settle(extent)

    def holders(self) -> list[Hashable]:
        """Who holds something."""
        return list(self._held)

    def born(self, segment: Segment) -> None:
        """A segment begins to live."""
        segment.extent.segments += 1
        self.nbytes += segment.nbytes

    def died(self, segment: Segment, now: float) -> None:
        """Nothing in a segment is needed any more."""
        self.nbytes -= segment.nbytes
        if self.waits:
            self._unburied.append((segment, now))
        else:
            self._bury(segment, now)

    def take_unburied(self) -> list[tuple[Segment, float]]:
        """What died since the last call, and when; for `bury`."""
        unburied, self._unburied = self._unburied, []
        return unburied

    def bury(self, dead: Iterable[tuple[Segment, float]]) -> None:
        """The memory of these may be used again."""
        for segment, now in dead:
            self._bury(segment, now)

    def _bury(self, segment: Segment, now: float) -> None:
        extent = segment.extent
        extent.segments -= 1
        start, nbytes = segment.start, segment.nbytes
        if extent.dead and sum(extent.dead[-1][1:]) == start:  # mostly they die as they were born
            _, start, before = extent.dead.pop()
            nbytes += before
        extent.dead.append((now, start, nbytes))
        self._settle(extent)

    def _settle(self, extent: Extent) -> None:
        if extent.holder is not None or self._replaying:
            return
        if extent.segments:
            if extent.dead:
                self._dying.setdefault(extent)
            return
        self._dying.pop(extent, None)
        del self._lent[extent.shard, extent.slot]
        extent.dead.clear()
        self._put_aside(extent)

    def _put_aside(self, extent: Extent) -> None:
        if self._aside is None:
            self._give_back(extent)
        else:
            self.holes.append(Hole(extent.shard, extent.start, extent.nbytes))
            self._aside.append(extent)

    def _give_back(self, extent: Extent) -> None:
        extent.warm = self._warm_bytes + extent.nbytes <= _WARM_BYTES
        if extent.warm:
            self._warm_bytes += extent.nbytes
        else:
            self.holes.append(Hole(extent.shard, extent.start, extent.nbytes))
        self._free[extent.units].append(extent)

    def sweep(self, now: float) -> None:
        """Give back the dead pages of extents that living rows have kept for a while."""
        if self._aside is not None and self._lent_again_at is None:
            self._lent_again_at = now + _CAUTION_S
        elif self._aside is not None and self._lent_again_at is not None:
            if now < self._lent_again_at:
                return
            aside, self._aside = self._aside, None
            for extent in aside:
                self._give_back(extent)
        while self._dying:
            extent = next(iter(self._dying))
            if not extent.dead or extent.dead[0][0] > now - _GRACE_S:
                return
            del self._dying[extent]
            for start, nbytes in _joined(extent.dead):
                self.holes.append(Hole(extent.shard, start, nbytes))
            extent.dead.clear()


def _joined(dead: list[tuple[float, int, int]]) -> list[tuple[int, int]]:
    """Ranges without their times, neighbours as one."""
    joined: list[tuple[int, int]] = []
    for start, nbytes in sorted(entry[1:] for entry in dead):
        if joined and sum(joined[-1]) == start:
            joined[-1] = joined[-1][0], joined[-1][1] + nbytes
        else:
            joined.append((start, nbytes))
    return joined
