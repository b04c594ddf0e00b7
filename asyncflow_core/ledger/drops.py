"""What was dropped: rows by reason, groups by serial."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping

from asyncflow_core.batch import GroupKey
from asyncflow_core.ledger.rows import Admission
from asyncflow_core.services.data_store import DroppedGroup

__all__ = ["DropLog"]


class DropLog:
    """Counters, and the last `length` dropped groups.

    Attributes:
        rows: cause to rows.
        last_serial: of the group dropped last; 0 when none was.
    """

    def __init__(self, *, length: int) -> None:
        """Nothing dropped."""
        self.rows: dict[str, int] = {}
        self.last_serial = 0
        self._groups: deque[DroppedGroup] = deque(maxlen=length)

    def add_rows(self, count: int, reason: str) -> None:
        """Count rows by what stands before the details, which differ from row to row."""
        cause = reason.partition(": ")[0]
        self.rows[cause] = self.rows.get(cause, 0) + count

    def add_group(self, key: GroupKey, admission: Admission, reason: str) -> None:
        """Log a group of which no row is left."""
        self.last_serial += 1
        self._groups.append(
            DroppedGroup(self.last_serial, key, admission.batch, admission.partition, reason)
        )

    def dump(self) -> tuple[dict[str, int], list[tuple[object, ...]]]:
        """Counters and groups, for `load`."""
        groups = [(d.serial, tuple(d.group), d.batch, d.partition, d.reason) for d in self._groups]
        return dict(self.rows), [tuple(group) for group in groups]

    def load(
        self,
        rows: Mapping[str, int],
        groups: Iterable[tuple[int, tuple[int, int, int], int | None, str, str]],
    ) -> None:
        """Know what a `dump` knew."""
        self.rows.update(rows)
        for serial, key, batch, partition, reason in groups:
            self._groups.append(DroppedGroup(serial, GroupKey(*key), batch, partition, reason))
            self.last_serial = serial

    def after(self, serial: int, most: int | None = None) -> tuple[DroppedGroup, ...]:
        """The logged groups above a serial, in order: the first `most` of them."""
        newer = max(0, self.last_serial - serial)  # serials have no gaps
        found = list(itertools.islice(reversed(self._groups), newer))
        return tuple(reversed(found))[:most]
