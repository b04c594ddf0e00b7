"""Versions as bytes in memory, cut into chunks that arrive and leave one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["CHUNK_BYTES", "Held"]

CHUNK_BYTES = 1 << 20
"""Large enough that a message costs little beside its bytes, small enough for a core's cache."""


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
    def empty(cls, sizes: Sequence[int]) -> Held:
        """Room for buffers of these sizes."""
        return cls([np.empty(size, np.uint8) for size in sizes])

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

    def has_buffer(self, number: int) -> bool:
        """Whether a buffer is there as a whole."""
        return self.landed >= self._ends[number]
