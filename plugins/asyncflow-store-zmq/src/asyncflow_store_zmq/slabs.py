"""Memory that reads are copied into: used again once nobody has an array in it.

A large array that is freed goes back to the system, and the next one costs a page fault every 4
KiB, which takes longer than to copy the rows. So a client keeps what it read into. An array is a
view of a *slab*, and every view of a view refers to the slab itself: whether somebody still has
one is the slab's reference count.
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

__all__ = ["Slabs"]

_SMALL_BYTES = 1 << 16
"""Below this, memory comes as fast from the allocator."""
_KEPT_BYTES = 64 << 20


class Slabs:
    """Room for arrays; at most 64 MiB of it are kept."""

    def __init__(self) -> None:
        """None yet."""
        self._slabs: list[NDArray[np.uint8]] = []
        self._bytes = 0

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """Memory that nobody has, not cleared; it is the caller's as long as there is a view."""
        if nbytes < _SMALL_BYTES:
            return np.empty(nbytes, np.uint8)
        for at in range(len(self._slabs)):
            # Two: the list's, and that of the call.
            if nbytes <= len(self._slabs[at]) and sys.getrefcount(self._slabs[at]) == 2:
                return self._slabs[at][:nbytes]
        slab = np.empty(1 << (nbytes - 1).bit_length(), np.uint8)
        if self._bytes + len(slab) > _KEPT_BYTES:  # what is free is too small: let it go
            self._slabs = [kept for kept in self._slabs if sys.getrefcount(kept) > 3]
            self._bytes = sum(map(len, self._slabs))
        if self._bytes + len(slab) <= _KEPT_BYTES:
            self._slabs.append(slab)
            self._bytes += len(slab)
        return slab[:nbytes]
