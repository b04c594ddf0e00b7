"""Puts and commits as runs: entries that follow each other, in what came and in the store. Pure."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from asyncflow_core.batch import GroupKey
from asyncflow_core.ledger import Admission, runs_of
from asyncflow_store_zmq.extents import Segment

__all__ = ["Incoming", "key_runs", "stretches"]

_NEXT = (0, 0, 1)


@dataclass(slots=True, eq=False)
class Incoming:
    """A put on its way in.

    Attributes:
        keys: int64 [groups, 3].
        admission: of its groups.
        tokens, oldest: of each group, int32.
        segment: where its groups lie, an entry each.
        left: what is not yet dealt with: entry, key and number of groups that follow each other.
        stored: groups that were new.
    """

    keys: NDArray[np.int64]
    admission: Admission
    tokens: array[int]
    oldest: array[int]
    segment: Segment
    left: deque[tuple[int, GroupKey, int]] = field(default_factory=deque)
    stored: int = 0


def key_runs(keys: NDArray[np.int64]) -> Iterator[tuple[int, GroupKey, int]]:
    """Groups that follow each other in a list of keys: where the first is, its key, how many."""
    if len(keys) == 1:
        yield 0, GroupKey(*keys[0].tolist()), 1
        return
    if not len(keys):
        return
    breaks = np.flatnonzero((keys[1:] - keys[:-1] != _NEXT).any(axis=1)) + 1
    starts = [0, *breaks.tolist()]
    ends = [*starts[1:], len(keys)]
    for start, end, key in zip(starts, ends, keys[starts].tolist(), strict=True):
        yield start, GroupKey(*key), end - start


def stretches(rows: Sequence[int], entries: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Runs of rows whose entries follow each other too: block, first, last excluded, entry."""
    position = 0
    for number, first, last in runs_of(rows):
        while first < last:
            entry, count = entries[position], 1
            while first + count < last and entries[position + count] == entry + count:
                count += 1
            yield number, first, first + count, entry
            first += count
            position += count
