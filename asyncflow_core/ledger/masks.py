"""Sets of rows of a block, as masks: an int whose bit i stands for row i.

An operation costs a few machine words whatever the set, so one serves all rows of a put at once.
A *run* is a stretch of neighbouring rows, (first, last excluded).
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["bits_in", "lowest", "positions_in", "runs_in", "span"]


def span(first: int, last: int) -> int:
    """The rows from `first` to `last`, excluded."""
    return (1 << last) - (1 << first)


def bits_in(mask: int) -> Iterator[int]:
    """The rows of a mask one by one, each as a mask, ascending."""
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit


def positions_in(mask: int) -> Iterator[int]:
    """The rows of a mask, ascending; costs the bits that are set."""
    return (bit.bit_length() - 1 for bit in bits_in(mask))


def runs_in(mask: int) -> Iterator[tuple[int, int]]:
    """The runs of a mask, ascending; costs the runs."""
    start = 0
    while mask:
        skipped = (mask & -mask).bit_length() - 1
        mask >>= skipped
        length = (~mask & (mask + 1)).bit_length() - 1
        start += skipped
        yield start, start + length
        mask >>= length
        start += length


def lowest(mask: int, count: int) -> int:
    """The first `count` rows of a mask, or all of them."""
    first = (mask & -mask).bit_length() - 1
    head = mask & ((1 << first + count) - 1)
    if head.bit_count() == count:  # they lie together, as nearly always
        return head
    if mask.bit_count() <= count:
        return mask
    low, high = first + count, mask.bit_length()
    while low < high:
        middle = (low + high) // 2
        if (mask & ((1 << middle) - 1)).bit_count() < count:
            low = middle + 1
        else:
            high = middle
    return mask & ((1 << low) - 1)
