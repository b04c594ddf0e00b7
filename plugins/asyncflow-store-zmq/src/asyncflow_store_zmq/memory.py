"""The memory a client writes to and reads from, by the address it connected to.

`ipc://` is this machine: columns are copied straight into and out of the shards' arenas. Anything
else goes through the shards' sockets as raw frames. Methods are generators of `Call`s (see
`session.py`), so that both clients, with and without an event loop, share them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncflow_core.batch import Column
from asyncflow_core.errors import DataError, LeaseLostError, ServiceTimeoutError
from asyncflow_store_zmq.arena import UNIT, Arena
from asyncflow_store_zmq.extents import LARGE_BYTES, LENT_BYTES
from asyncflow_store_zmq.layout import Layout, Packed, Piece, finish, take
from asyncflow_store_zmq.places import MAX_ENTRIES, entry_of
from asyncflow_store_zmq.slabs import Slabs

_RESERVED_BYTES = 1 << 16
_ROWS_A_MESSAGE = 4096
"""Asked of a shard at a time: each may be a run of its own, which its message describes."""

__all__ = [
    "Await",
    "Begin",
    "Call",
    "FrameMemory",
    "Lent",
    "Memory",
    "NoAnswerError",
    "SharedMemory",
    "Space",
    "Steps",
    "StreamSteps",
    "Wanted",
    "lost_rows",
    "pieces_of",
]


class Call(NamedTuple):
    """One call to make: to the controller (shard -1) or a shard."""

    method: str
    arguments: list[Any]
    wait_s: float | None = 0.0
    shard: int = -1


class Begin(NamedTuple):
    """Send a call and go on. Nothing but its answer ends it.

    Attributes:
        call: to make.
        note: is told the handle for `Await` once it is under way: whatever cuts these steps off
            then, somebody knows of it.
    """

    call: Call
    note: Callable[[Any], None]


class Await(NamedTuple):
    """Wait for a call that was begun; raises `NoAnswerError` when that takes too long."""

    handle: Any
    call: Call


class NoAnswerError(ServiceTimeoutError):
    """No answer yet, unlike a timeout that the store itself answers; it may be waited for again."""


Steps = Generator[Call, Any, Any]
StreamSteps = Generator[Call | Begin | Await, Any, Any]
"""Steps of what has calls under way between two of them."""


@dataclass(slots=True)
class Lent:
    """A borrowed extent.

    Attributes:
        position: where the next segment goes. end: of the extent.
        reserved: up to where the pages are there.
        writing: segments the controller has not been told of.
    """

    shard: int
    slot: int
    position: int
    end: int
    reserved: int
    writing: int = 0


class Space:
    """The extent being filled, one ahead, and those that are full.

    What is full and whether one ahead is wanted goes along with every put and commit, so memory
    arrives before it is needed.
    """

    def __init__(self) -> None:
        """Nothing lent."""
        self._now: Lent | None = None
        self._next: Lent | None = None
        self._full: list[Lent] = []
        self._asked = False
        self._wish = LENT_BYTES

    def wish(self, nbytes: int) -> int:
        """How much to ask for when a segment of this size does not fit."""
        return nbytes if nbytes > LARGE_BYTES else self._wish

    def take(self, nbytes: int) -> tuple[Lent, int] | None:
        """Room for a segment and where it begins; None when an extent must be asked for first."""
        self._wish = min(LARGE_BYTES, max(LENT_BYTES, 8 * nbytes))
        if nbytes > LARGE_BYTES:
            return None
        while self._now is None or self._now.position + nbytes > self._now.end:
            if self._now is not None:
                self._full.append(self._now)
            self._now, self._next = self._next, None
            if self._now is None:
                return None
        return self._cut(self._now, nbytes)

    def take_from(self, reply: Sequence[int], nbytes: int) -> tuple[Lent, int]:
        """Room in an extent that was asked for; a large segment has its own."""
        lent = _lent(reply)
        if nbytes > LARGE_BYTES or self._now is not None:
            self._full.append(lent)
        else:
            self._now = lent
        return self._cut(lent, nbytes)

    def _cut(self, lent: Lent, nbytes: int) -> tuple[Lent, int]:
        start = lent.position
        lent.position += nbytes
        lent.writing += 1
        return lent, start

    def full(self) -> list[list[int]]:
        """Extents to give back: full, and the controller knows of all that is in them."""
        if not self._full:
            return []
        done = [lent for lent in self._full if not lent.writing]
        if done:
            self._full = [lent for lent in self._full if lent.writing]
        return [[lent.shard, lent.slot] for lent in done]

    def report(self) -> list[Any]:
        """What rides along: extents given back, and how many bytes are wanted ahead."""
        wanted = self._next is None and not self._asked
        self._asked |= wanted
        return [self.full(), self._wish if wanted else 0]

    def add(self, report: list[Any], reply: Sequence[int] | None) -> None:
        """What came back for a report; None also when the call failed."""
        if report[1]:
            self._asked = False
        if reply is not None:
            self._next = _lent(reply)


def _lent(reply: Sequence[int]) -> Lent:
    shard, slot, nbytes = reply
    return Lent(shard, slot, slot * UNIT, slot * UNIT + nbytes, slot * UNIT)


class Wanted(NamedTuple):
    """Rows to read: for each source, its columns and the rows' places; and the segments there."""

    rows: int
    sources: list[tuple[list[str], NDArray[np.int64]]]
    segments: dict[int, tuple[int, ...]]


class Memory(Protocol):
    """How bytes get in and out."""

    def write(self, lent: Lent, start: int, packed: Packed) -> Steps:
        """Copy a segment in."""

    def read(self, wanted: Wanted, columns: Sequence[str], layouts: dict[int, Layout]) -> Steps:
        """Copy columns out: name to column.

        Raises:
            LeaseLostError: the memory was given away, so the rows are no longer there.
            DataError: what a writer left there has not the form it said.
        """

    def close(self) -> None:
        """Give back what it holds."""


def pieces_of(places: NDArray[np.int64]) -> list[tuple[int, int, int, int]]:
    """Runs of rows that lie one after another: (segment, first, last excluded, repeat)."""
    if len(places) == 1:
        segment, entry = entry_of(int(places[0]))
        return [(segment, entry, entry + 1, 1)]
    steps = np.diff(places)
    if (steps == 1).all():
        segment, entry = entry_of(int(places[0]))
        if entry + len(places) <= MAX_ENTRIES:
            return [(segment, entry, entry + len(places), 1)]
    runs: list[tuple[int, int, int, int]] = []
    for place in places.tolist():
        segment, entry = entry_of(place)
        if runs:
            last = runs[-1]
            if segment == last[0] and entry == last[2] and last[3] == 1:
                runs[-1] = segment, last[1], entry + 1, 1
                continue
            if segment == last[0] and entry == last[1] and last[2] == entry + 1:
                runs[-1] = segment, entry, entry + 1, last[3] + 1
                continue
        runs.append((segment, entry, entry + 1, 1))
    return runs


def lost_rows() -> LeaseLostError:
    """The error of a read that came too late."""
    return LeaseLostError(
        "the rows were given away while they were read: the lease is over, or they were dropped; "
        "lease again"
    )


class SharedMemory:
    """The arenas, mapped."""

    def __init__(self, paths: Sequence[str]) -> None:
        """Map them; those that come later lie beside them, by number."""
        self._arenas = [Arena(Path(path)) for path in paths]
        self._slabs = Slabs()

    def _arena(self, shard: int) -> Arena:
        while shard >= len(self._arenas):
            path = self._arenas[0].path
            self._arenas.append(Arena(path.with_name(f"shard-{len(self._arenas)}.arena")))
        return self._arenas[shard]

    def write(self, lent: Lent, start: int, packed: Packed) -> Steps:
        """One copy, no message."""
        arena = self._arena(lent.shard)
        end = start + packed.nbytes
        if end > lent.reserved:  # for the next ones too: a call to the system takes its time
            ahead = max(end, min(start + _RESERVED_BYTES, lent.end))
            arena.reserve(start, ahead - start)
            lent.reserved = ahead
        packed.write(arena.data[start : start + packed.nbytes])
        return
        yield  # a generator, as the other memory's

    def read(self, wanted: Wanted, columns: Sequence[str], layouts: dict[int, Layout]) -> Steps:
        """One copy, no message; see `Arena` for why nothing has to be locked."""
        found: dict[str, Column] = {}
        used: set[int] = set()  # a lease's other segments may be gone: committed row by row
        try:
            for names, places in wanted.sources:
                chosen = [name for name in names if name in columns]
                if chosen:
                    pieces = self._pieces(wanted, places, layouts, used)
                    found.update(take(pieces, chosen, self._slabs.take))
        except DataError:
            if self._holds(wanted, used):
                raise
            raise lost_rows() from None
        if not self._holds(wanted, used):
            raise lost_rows()
        return found
        yield

    def _holds(self, wanted: Wanted, used: Iterable[int]) -> bool:
        for number in used:
            _, shard, slot, start, _, _, _, generation = wanted.segments[number]
            if not self._arena(shard).holds(start, slot, generation):
                return False
        return True

    def _pieces(
        self,
        wanted: Wanted,
        places: NDArray[np.int64],
        layouts: dict[int, Layout],
        used: set[int],
    ) -> list[Piece]:
        pieces = []
        for number, first, last, repeat in pieces_of(places):
            used.add(number)
            _, shard, _, start, nbytes, rows, layout, _ = wanted.segments[number]
            data = self._arena(shard).data[start : start + nbytes]
            pieces.append(Piece(data, layouts[layout], rows, first, last, repeat))
        return pieces

    def close(self) -> None:
        """Unmap."""
        for arena in self._arenas:
            arena.close()


class FrameMemory:
    """The arenas through their shards' sockets."""

    def write(self, lent: Lent, start: int, packed: Packed) -> Steps:
        """One message to the shard."""
        data = np.zeros(packed.nbytes, np.uint8)
        packed.write(data)
        yield Call("shard.write", [[start, data]], None, lent.shard)

    def read(self, wanted: Wanted, columns: Sequence[str], layouts: dict[int, Layout]) -> Steps:
        """One message to each shard that holds some of the rows."""
        found: dict[str, Column] = {}
        for names, places in wanted.sources:
            chosen = [name for name in names if name in columns]
            if chosen:
                found.update((yield from self._read(wanted, places, chosen, layouts)))
        return found

    def _read(
        self,
        wanted: Wanted,
        places: NDArray[np.int64],
        names: list[str],
        layouts: dict[int, Layout],
    ) -> Steps:
        shards: dict[int, list[int]] = {}  # to the positions of its rows
        for position, place in enumerate(places.tolist()):
            shards.setdefault(wanted.segments[entry_of(place)[0]][1], []).append(position)
        parts: dict[str, list[Column]] = {name: [] for name in names}
        for shard, positions in shards.items():
            for at in range(0, len(positions), _ROWS_A_MESSAGE):
                runs = []
                for number, first, last, repeat in pieces_of(
                    places[positions[at : at + _ROWS_A_MESSAGE]]
                ):
                    _, _, slot, start, nbytes, rows, layout, generation = wanted.segments[number]
                    place = [slot, generation, start, nbytes, layouts[layout].dump(), rows]
                    runs.append([*place, first, last, repeat])
                reply = yield Call("shard.take", [runs, names], None, shard)
                if reply is None:
                    raise lost_rows()
                for name, (kind, values, offsets) in zip(names, reply, strict=True):
                    parts[name].append(finish(kind, values, offsets))
        order = np.argsort(np.concatenate([*map(np.asarray, shards.values())]))
        return {
            name: columns[0] if len(columns) == 1 else Column.concat(columns).take(order)
            for name, columns in parts.items()
        }

    def close(self) -> None:
        """Nothing to give back."""
