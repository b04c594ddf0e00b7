"""A hand-out as a client has it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from asyncflow_core.batch import BatchRef, Key
from asyncflow_core.services.data_store import Lease, RowInfo
from asyncflow_store_zmq.payload import FACTS

__all__ = ["Handed"]


class Handed:
    """Rows of a lease in lines of numbers, as they came; what a row is called when it is asked.

    A reader that only computes on columns never asks, which spares most of what it would do.

    Attributes:
        lease_id: of the lease; its fence too.
        rows: their numbers.
        whole: whether groups come only whole.
    """

    __slots__ = ("_asked", "_lease", "_lines", "lease_id", "rows", "whole")

    def __init__(
        self, lease_id: int, asked: Sequence[object], lines: NDArray[np.int64], *, whole: bool
    ) -> None:
        """Keep what came: lines as `FACTS` says, int64 [FACTS, rows], for what was `asked`."""
        self.lease_id = lease_id
        self.whole = whole
        self.rows: list[int] = lines[0].tolist()
        self._asked = asked
        self._lines = lines
        self._lease: Lease | None = None

    def __len__(self) -> int:
        """Rows."""
        return len(self.rows)

    @property
    def lease(self) -> Lease:
        """In core's form."""
        if self._lease is None:
            task, requester, lease_s = str(self._asked[0]), str(self._asked[1]), self._asked[6]
            assert isinstance(lease_s, int | float)
            infos = self.infos(0, len(self))
            self._lease = Lease(self.lease_id, task, requester, self.lease_id, lease_s, infos)
        return self._lease

    @property
    def tokens(self) -> list[int]:
        """Of each row."""
        found: list[int] = self._lines[6].tolist()
        return found

    def ref(self, first: int = 0, last: int | None = None) -> BatchRef:
        """Neighbouring rows by reference; all of them by default."""
        return BatchRef(self.lease_id, self.lease_id, tuple(self.rows[first:last]))

    def infos(self, first: int, last: int) -> tuple[RowInfo, ...]:
        """What is said of neighbouring rows."""
        numbers, *parts, batches, tokens, oldest = self._lines[:FACTS, first:last].tolist()
        return tuple(
            map(
                RowInfo,
                numbers,
                map(Key, *parts),
                [None if batch < 0 else batch for batch in batches],
                tokens,
                [None if version < 0 else version for version in oldest],
            )
        )

    def key(self, position: int) -> Key:
        """Of a row."""
        return Key(*self._lines[1:5, position].tolist())

    def ends(self) -> Sequence[int]:
        """Where the hand-out may be cut: after each row, or after each group."""
        if not self.whole:
            return range(1, len(self) + 1)
        groups = self._lines[1:4]
        changes = np.flatnonzero((groups[:, 1:] != groups[:, :-1]).any(axis=0)) + 1
        return [*changes.tolist(), len(self)]
