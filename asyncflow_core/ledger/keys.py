"""Which prompt groups were ever put, in little memory."""

from __future__ import annotations

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
        source = key[:2]
        above = self._above.get(source, ())
        return key.sequence < self._watermarks.get(source, 0) or key.sequence in above

    def add(self, key: GroupKey) -> None:
        """Remember a group."""
        source = key[:2]
        watermark = self._watermarks.get(source, 0)
        above = self._above.setdefault(source, set())
        above.add(key.sequence)
        while watermark in above:
            above.remove(watermark)
            watermark += 1
        self._watermarks[source] = watermark
