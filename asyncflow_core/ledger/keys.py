"""Prompt groups by key: which were ever put, in little memory, and which live."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from asyncflow_core.batch import GroupKey
from asyncflow_core.ledger.blocks import Block

__all__ = ["KeyIndex", "KnownKeys"]


class _Source:
    """What is known of a source's epoch: all sequences below a watermark, and some above it."""

    __slots__ = ("above", "origin", "watermark")

    def __init__(self, origin: tuple[int, int]) -> None:
        self.origin = origin
        self.watermark = 0
        self.above: set[int] = set()


class KnownKeys:
    """A watermark a (source, epoch), and a sparse set of the sequences above it.

    Sources count their sequences up, so the set holds only what is out of order.
    """

    def __init__(self) -> None:
        """Nothing known."""
        self._sources: dict[tuple[int, int], _Source] = {}

    def __contains__(self, key: GroupKey) -> bool:
        """Whether the group was ever added."""
        source = self._sources.get(key[:2])
        return source is not None and (key[2] < source.watermark or key[2] in source.above)

    def unknown_in(self, key: GroupKey, count: int) -> Iterator[tuple[int, int]]:
        """The runs (first, last excluded) of `count` sequences from a key's on that are new."""
        first, last = key[2], key[2] + count
        source = self._sources.get(key[:2])
        if source is None:
            yield first, last
            return
        first = max(first, source.watermark)
        if first < last and (not source.above or source.above.isdisjoint(range(first, last))):
            yield first, last
            return
        while first < last:
            if first in source.above:
                first += 1
                continue
            end = first + 1
            while end < last and end not in source.above:
                end += 1
            yield first, end
            first = end

    def dump(self) -> list[tuple[int, int, int, list[int]]]:
        """(source, epoch, watermark, sequences above it), for `load`."""
        return [
            (*source.origin, source.watermark, sorted(source.above))
            for source in self._sources.values()
        ]

    def load(self, dumped: Iterable[tuple[int, int, int, Iterable[int]]]) -> None:
        """Know what a `dump` knew."""
        for number, epoch, watermark, above in dumped:
            source = self._sources[number, epoch] = _Source((number, epoch))
            source.watermark, source.above = watermark, set(above)

    def add(self, key: GroupKey, count: int) -> tuple[int, int]:
        """Remember `count` groups from a key on; their (source, epoch), one object for all."""
        source = self._sources.get(key[:2])
        if source is None:
            source = self._sources[key[:2]] = _Source(key[:2])
        first, last = key[2], key[2] + count
        if first > source.watermark:
            source.above.update(range(first, last))
        elif last > source.watermark:
            source.watermark = last
            if source.above:
                source.above.difference_update(range(first, last))
            while source.above and source.watermark in source.above:
                source.above.remove(source.watermark)
                source.watermark += 1
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
