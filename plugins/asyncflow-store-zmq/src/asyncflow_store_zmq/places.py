"""Where each block's payload lies, in little memory. Pure.

A *place* is a segment and a position in it, packed into one integer; -1 stands for nothing written.
A block's places are one array: the number of its plan (who writes what into it), the place of what
the rows of its first group share (the other groups' follow it), then, once something was written,
for each task that writes columns the place of each row's own.
"""

from __future__ import annotations

from array import array

__all__ = ["ENTRY_BITS", "HEAD", "MAX_ENTRIES", "NOWHERE", "Places", "entry_of", "place_of"]

Places = array  # of int64
NOWHERE = -1
HEAD = 2
"""Entries before the rows' own."""
ENTRY_BITS = 20
MAX_ENTRIES = 1 << ENTRY_BITS


def place_of(segment: int, entry: int) -> int:
    """One integer of both."""
    return segment << ENTRY_BITS | entry


def entry_of(place: int) -> tuple[int, int]:
    """Segment and entry of a place."""
    return place >> ENTRY_BITS, place & (MAX_ENTRIES - 1)
