"""Prompt groups by key: which were ever put, in little memory, and which live."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

from asyncflow_core.batch import GroupKey
from asyncflow_core.ledger.blocks import Block

__all__ = ["KeyIndex", "KnownKeys"]


class _Source:
    """What is known of a source's epoch: runs of sequences, sorted, with a gap between any two."""

    __slots__ = ("ends", "origin", "starts")

    def __init__(self, origin: tuple[int, int]) -> None:
        self.origin = origin
        self.starts: list[int] = []
        self.ends: list[int] = []  # each excluded

    def add(self, first: int, last: int) -> None:
        ends = self.ends
        if ends and ends[-1] == first < last:  # as sources count
            ends[-1] = last
            return
        if first >= last:
            return
        # Runs that overlap or touch these sequences become one with them.
        left, right = bisect_left(ends, first), bisect_right(self.starts, last)
        if left < right:
            first, last = min(first, self.starts[left]), max(last, ends[right - 1])
        self.starts[left:right], ends[left:right] = [first], [last]


class KnownKeys:
    """Runs of sequences a (source, epoch).

    Sources count their sequences up, from wherever they begin: mostly there is one run each.
    """

    def __init__(self) -> None:
        """Nothing known."""
        self._sources: dict[tuple[int, int], _Source] = {}

    def __contains__(self, key: GroupKey) -> bool:
        """Whether the group was ever added."""
        return next(self.unknown_in(key, 1), None) is None

    def unknown_in(self, key: GroupKey, count: int) -> Iterator[tuple[int, int]]:
        """The runs (first, last excluded) of `count` sequences from a key's on that are new."""
        first, last = key[2], key[2] + count
        source = self._sources.get(key[:2])
        starts, ends = (source.starts, source.ends) if source is not None else ([], [])
        at = bisect_right(ends, first)
        while first < last:
            start = starts[at] if at < len(starts) else last
            if first < start:
                yield first, min(start, last)
            if at == len(starts):
                return
            first = ends[at]
            at += 1

    def dump(self) -> list[tuple[int, int, list[int], list[int]]]:
        """(source, epoch, starts of runs, their ends), for `load`."""
        return [
            (*source.origin, list(source.starts), list(source.ends))
            for source in self._sources.values()
        ]

    def load(self, dumped: Iterable[tuple[int, int, Iterable[int], Iterable[int]]]) -> None:
        """Know what a `dump` knew."""
        for number, epoch, starts, ends in dumped:
            source = self._sources[number, epoch] = _Source((number, epoch))
            source.starts, source.ends = list(starts), list(ends)

    def add(self, key: GroupKey, count: int) -> tuple[int, int]:
        """Remember `count` groups from a key on; their (source, epoch), one object for all."""
        source = self._sources.get(key[:2])
        if source is None:
            source = self._sources[key[:2]] = _Source(key[:2])
        source.add(key[2], key[2] + count)
        return source.origin


class KeyIndex:
    """The block of each group that lives."""

    def __init__(self) -> None:
        """Nothing lives."""
        self._blocks: dict[tuple[int, int], dict[int, Block]] = {}

    def add(self, block: Block) -> None:
        """Find a block by its groups."""
        found = self._blocks.setdefault(block.origin, {})
        if block.groups == 1:
            found[block.first] = block
        else:
            found.update(dict.fromkeys(range(block.first, block.first + block.groups), block))

    def remove(self, block: Block) -> None:
        """A block has no living row."""
        found = self._blocks[block.origin]
        for sequence in range(block.first, block.first + block.groups):
            del found[sequence]
        if not found:
            del self._blocks[block.origin]

    def find(self, key: GroupKey) -> Block | None:
        """The block of a group, of which the group itself may have no living row."""
        return self._blocks.get(key[:2], {}).get(key[2])
