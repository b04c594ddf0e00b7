"""Where each group's payload lies, in little memory. Pure.

A group has a run of numbers in one long table: first the place of what its rows share, then, for
each task that writes columns, the place of each row's own. A *place* is a segment and a position
in it, packed into one integer; -1 stands for nothing written.
"""

from __future__ import annotations

from array import array
from collections import defaultdict

__all__ = ["ENTRY_BITS", "NOWHERE", "PlaceTable", "entry_of", "place_of"]

NOWHERE = -1
ENTRY_BITS = 20
MAX_ENTRIES = 1 << ENTRY_BITS


def place_of(segment: int, entry: int) -> int:
    """One integer of both."""
    return segment << ENTRY_BITS | entry


def entry_of(place: int) -> tuple[int, int]:
    """Segment and entry of a place."""
    return place >> ENTRY_BITS, place & (MAX_ENTRIES - 1)


class PlaceTable:
    """Runs of places; freed runs are used again."""

    def __init__(self) -> None:
        """An empty table."""
        self.values = array("q")
        self._free: dict[int, list[int]] = defaultdict(list)  # by length

    def add(self, shared: int, own: int) -> int:
        """A run for one shared place and `own` further ones; where it begins."""
        free = self._free.get(1 + own)
        if free:
            start = free.pop()
            self.values[start] = shared
            return start
        start = len(self.values)
        self.values.append(shared)
        for _ in range(own):
            self.values.append(NOWHERE)
        return start

    def free(self, start: int, own: int) -> None:
        """Forget a run."""
        for position in range(start + 1, start + 1 + own):
            self.values[position] = NOWHERE
        self._free[1 + own].append(start)
