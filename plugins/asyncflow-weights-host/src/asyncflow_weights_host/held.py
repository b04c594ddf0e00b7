"""Versions as bytes in memory, cut into chunks that arrive and leave one by one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["CHUNK_BYTES", "Held", "Pool"]

CHUNK_BYTES = 1 << 20
"""Large enough that a message costs little beside its bytes, small enough for a core's cache."""


class Pool:
    """Memory that is used again once nobody else refers to it.

    A first touch of fresh pages costs several times what the copy into them does. Whoever has an
    array of the pool, or a view of one, keeps it from being used again by that alone: CPython's
    reference count says so.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._arrays: list[NDArray[np.uint8]] = []

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """Memory of that size, with whatever was in it."""
        for number in range(len(self._arrays)):
            if len(self._arrays[number]) == nbytes and self._is_free(number):
                return self._arrays[number]
        self._arrays.append(np.empty(nbytes, np.uint8))
        return self._arrays[-1]

    def trim(self) -> None:
        """Give back what nobody refers to."""
        busy = [number for number in range(len(self._arrays)) if not self._is_free(number)]
        self._arrays = [self._arrays[number] for number in busy]

    def _is_free(self, number: int) -> bool:
        # The list's own reference, and that of the call.
        return sys.getrefcount(self._arrays[number]) == 2


@dataclass(slots=True, eq=False)
class Held:
    """Buffers of one version, or of a delta, whole or still coming.

    Attributes:
        buffers: in order; what has not landed yet is undefined.
        landed: chunks that are there, from the first on.
        failed: why no more will come, if so.
    """

    buffers: Sequence[NDArray[np.uint8]]
    landed: int = 0
    failed: str = ""
    _places: list[tuple[int, int]] = field(default_factory=list)
    _ends: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Cut the buffers; chunks never cross from one to the next."""
        for number, buffer in enumerate(self.buffers):
            self._places += [(number, start) for start in range(0, len(buffer), CHUNK_BYTES)]
            self._ends.append(len(self._places))

    @classmethod
    def whole(cls, buffers: Sequence[NDArray[np.uint8]]) -> Held:
        """What is there already."""
        held = cls(buffers)
        held.landed = held.chunks
        return held

    @property
    def chunks(self) -> int:
        """How many chunks it is cut into."""
        return len(self._places)

    @property
    def complete(self) -> bool:
        """Whether all is there."""
        return self.landed == self.chunks

    def chunk(self, number: int) -> NDArray[np.uint8]:
        """The memory of a chunk."""
        buffer, start = self._places[number]
        return self.buffers[buffer][start : start + CHUNK_BYTES]

    def at_an_end(self) -> bool:
        """Whether the chunk that landed last ended a buffer."""
        return self.landed in self._ends

    def has_buffer(self, number: int) -> bool:
        """Whether a buffer is there as a whole."""
        return self.landed >= self._ends[number]
