"""Which prompt groups were ever put, in little memory."""

from __future__ import annotations

from collections.abc import Iterable

from asyncflow_core.batch import GroupKey

__all__ = ["KnownKeys"]


class KnownKeys:
    """A watermark a (source, epoch), and a sparse set of the sequences above it.

    Sources count their sequences up, so the set holds only what is out of order.
    """

    def __init__(self) -> None:
        """Nothing known."""
        self._watermarks: dict[tuple[int, int], int] = {}  # all sequences below are known
        self._above: dict[tuple[int, int], set[int]] = {}

    def __contains__(self, key: GroupKey) -> bool:
        """Whether the group was ever added."""
        source, sequence = key[:2], key[2]
        return sequence < self._watermarks.get(source, 0) or sequence in self._above.get(source, ())

    def dump(self) -> list[tuple[int, int, int, list[int]]]:
        """(source, epoch, watermark, sequences above it), for `load`."""
        return [
            (*source, watermark, sorted(self._above.get(source, ())))
            for source in self._watermarks.keys() | self._above.keys()
            for watermark in [self._watermarks.get(source, 0)]
        ]

    def load(self, dumped: Iterable[tuple[int, int, int, Iterable[int]]]) -> None:
        """Know what a `dump` knew."""
        for source, epoch, watermark, above in dumped:
            self._watermarks[source, epoch] = watermark
            self._above[source, epoch] = set(above)

    def add(self, key: GroupKey) -> None:
        """Remember a group."""
        source, sequence = key[:2], key[2]
        watermark = self._watermarks.get(source, 0)
        if sequence != watermark:
            if sequence > watermark:
                self._above.setdefault(source, set()).add(sequence)
            return
        watermark += 1
        above = self._above.get(source)
        while above and watermark in above:
            above.remove(watermark)
            watermark += 1
        self._watermarks[source] = watermark
