"""The memory a client writes to and reads from, by the address it connected to.

`ipc://` is this machine: columns are copied straight into and out of the shards' arenas. Anything
else goes through the shards' sockets as raw frames. Methods are generators of `Call`s (see
`session.py`), so that both clients, with and without an event loop, share them.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncflow_core.batch import Column
from asyncflow_core.errors import LeaseLostError
from asyncflow_store_zmq.arena import UNIT, Arena
from asyncflow_store_zmq.layout import Layout, Packed, Piece, take
from asyncflow_store_zmq.places import MAX_ENTRIES, entry_of

__all__ = ["Call", "FrameMemory", "Memory", "SharedMemory", "Space", "Wanted", "pieces_of"]


class Call(NamedTuple):
    """One call to make: to the controller (shard -1) or a shard."""

    method: str
    arguments: list[Any]
    wait_s: float | None = 0.0
    shard: int = -1


Steps = Generator[Call, Any, Any]


@dataclass(slots=True)
class _Lent:
    shard: int
    slot: int
    position: int
    end: int
    writing: int = 0  # segments written and not yet told to the controller


class Space:
    """The extent being filled, one ahead, and those that are full.

    `wants` and `sealed` go along with every put and commit, so that memory arrives before it is
    needed.
    """

    def __init__(self) -> None:
        """Nothing lent."""
        self._now: _Lent | None = None
        self._next: _Lent | None = None
        self._full: list[_Lent] = []

    def add(self, lent: Sequence[int] | None) -> None:
        """Take what the controller lent."""
        if lent is not None:
            shard, slot, nbytes = lent
            self._next_or_now(_Lent(shard, slot, slot * UNIT, slot * UNIT + nbytes))

    def _next_or_now(self, lent: _Lent) -> None:
        if self._now is None:
            self._now = lent
        elif self._next is None:
            self._next = lent
        else:
            self._full.append(lent)  # a race of two calls: give it back unused

    def take(self, nbytes: int) -> tuple[_Lent, int] | None:
        """Room for a segment and where it begins; None when a further extent is needed first."""
        while self._now is not None:
            lent = self._now
            if lent.position + nbytes <= lent.end:
                start = lent.position
                lent.position += nbytes
                lent.writing += 1
                return lent, start
            if self._next is None and lent.position == lent.slot * UNIT:
                return None  # empty and too small: keep it for smaller ones
            self._full.append(lent)
            self._now, self._next = self._next, None
        return None

    def put_first(self, lent: Sequence[int]) -> None:
        """An extent that was asked for a large segment: used at once."""
        if self._now is not None:
            (self._full if self._next is not None else []).append(self._now)
            self._next = self._next or self._now
        shard, slot, nbytes = lent
        self._now = _Lent(shard, slot, slot * UNIT, slot * UNIT + nbytes)

    def report(self) -> list[Any]:
        """What rides along: full extents all of whose segments were told, and bytes wanted."""
        done = [lent for lent in self._full if not lent.writing]
        if done:
            self._full = [lent for lent in self._full if lent.writing]
        wanted = 0 if self._next is not None else 1
        return [[[lent.shard, lent.slot] for lent in done], wanted]


class Wanted(NamedTuple):
    """Rows to read: for each source, its columns and the rows' places; and the segments there."""

    rows: int
    sources: list[tuple[list[str], NDArray[np.int64]]]
    segments: dict[int, list[int]]


class Memory(Protocol):
    """How bytes get in and out."""

    def write(self, lent: _Lent, start: int, packed: Packed) -> Steps:
        """Copy a segment in."""

    def read(self, wanted: Wanted, columns: Sequence[str], layouts: dict[int, Layout]) -> Steps:
        """Copy columns out: name to column.

        Raises:
            LeaseLostError: the memory was lent anew meanwhile, so the rows are no longer there.
        """


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


def _lost(lease: str = "") -> LeaseLostError:
    return LeaseLostError(
        "the rows were given away while they were read: the lease is over, or they were dropped; "
        "lease again"
    )


class SharedMemory:
    """The arenas, mapped."""

    def __init__(self, paths: Sequence[str]) -> None:
        """Map them."""
        self._arenas = [Arena(Path(path)) for path in paths]

    def write(self, lent: _Lent, start: int, packed: Packed) -> Steps:
        """One copy, no message."""
        arena = self._arenas[lent.shard]
        arena.reserve(start, packed.nbytes)
        packed.write(arena.data[start : start + packed.nbytes])
        return
        yield  # a generator, as the other memory's

    def read(self, wanted: Wanted, columns: Sequence[str], layouts: dict[int, Layout]) -> Steps:
        """One copy, no message; see `Arena` for why nothing has to be locked."""
        found: dict[str, Column] = {}
        for names, places in wanted.sources:
            chosen = [name for name in names if name in columns]
            if chosen:
                found.update(take(self._pieces(wanted, places, layouts), chosen))
        for _, shard, slot, _, _, _, _, generation in wanted.segments.values():
            if int(self._arenas[shard].generations[slot]) != generation:
                raise _lost()
        return found
        yield

    def _pieces(
        self, wanted: Wanted, places: NDArray[np.int64], layouts: dict[int, Layout]
    ) -> list[Piece]:
        pieces = []
        for number, first, last, repeat in pieces_of(places):
            _, shard, _, start, nbytes, rows, layout, _ = wanted.segments[number]
            data = self._arenas[shard].data[start : start + nbytes]
            pieces.append(Piece(data, layouts[layout], rows, first, last, repeat))
        return pieces

    def close(self) -> None:
        """Unmap."""
        for arena in self._arenas:
            arena.close()


class FrameMemory:
    """The arenas through their shards' sockets."""

    def write(self, lent: _Lent, start: int, packed: Packed) -> Steps:
        """One message to the shard."""
        data = np.zeros(packed.nbytes, np.uint8)
        packed.write(data)
        yield Call("shard.write", [[start, data]], None, lent.shard)

    def read(self, wanted: Wanted, columns: Sequence[str], layouts: dict[int, Layout]) -> Steps:
        """One message to each shard for the rows' offsets, one for their values."""
        raise NotImplementedError
        yield

    def close(self) -> None:
        """Nothing to give back."""
