"""Training whatever is ready, within the bound. Pure.

A step takes the first whole groups that are ready, the oldest batch first. It never waits for a
straggler, so a straggler may become too old. What then happens to it is `too_stale`:

- `requeue`: the rows of its group are dropped and the same prompt is generated again, in the newest
  batch. Every prompt is trained in the end, the slowest ones late.
- `drop`: its rows that are too old are dropped. The group goes on smaller; one without a row left
  is replaced by the next prompt.
- `mask`: its rows that are too old are acknowledged without being trained, so the step has fewer.

All three leave out what takes long: trained lengths are not those of the data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import ClassVar, Literal

from asyncflow_core.batch import GroupKey
from asyncflow_core.errors import InvariantError, StalenessViolationError
from asyncflow_core.flow.running.admission import Admission
from asyncflow_core.flow.running.policies.sorted_rows import Sorted, staleness
from asyncflow_core.services.data_store import Order, RowInfo

__all__ = ["TOO_STALE", "ReadyAdmission", "ReadyFirst", "TooStale"]

TooStale = Literal["requeue", "drop", "mask"]

TOO_STALE = "too stale"
"""The reason that rows are dropped or masked with."""


class ReadyFirst:
    """Sorts leased groups by whether each of their rows is young enough.

    The bound holds by construction: nothing else gets into `Sorted.train`.

    Attributes:
        rows: what was done with rows that are too old, to rows.
    """

    lease_order: ClassVar[Order] = Order.ADMITTED
    claims_lengths: ClassVar[bool] = False

    def __init__(self, max_staleness: int, too_stale: TooStale) -> None:
        """`max_staleness` in versions."""
        self._max_staleness = max_staleness
        self._too_stale = too_stale
        self.rows: Counter[str] = Counter()

    def sort(self, version: int, rows: Sequence[RowInfo]) -> Sorted:
        """Rows of whole groups.

        Raises:
            StalenessViolationError: a row is newer than the step.
        """
        old: set[int] = set()
        for at, info in enumerate(rows):
            found = staleness(version, info)
            if found < 0:
                raise StalenessViolationError(
                    f"row {info.key} of step {version} has a token of version "
                    f"{info.oldest_version}, which is not there yet"
                )
            if found > self._max_staleness:
                old.add(at)
        if self._too_stale == "requeue":
            again: set[GroupKey] = {rows[at].key.group for at in old}
            old = {at for at, info in enumerate(rows) if info.key.group in again}
        self.rows[self._too_stale] += len(old)
        train = [at for at in range(len(rows)) if at not in old]
        if self._too_stale == "mask":
            return Sorted(train, mask=sorted(old), reason=TOO_STALE)
        return Sorted(train, drop=sorted(old), reason=TOO_STALE)


class ReadyAdmission(Admission):
    """Which prompt groups may start: at version v, (v + 1 + max_staleness) steps' worth in all.

    The batch of a group only says at which version it may start, as in `Admission`: b at version
    >= b - max_staleness. A group that was dropped is replaced at once, at the version now.
    """

    def replace(self, batch: int) -> None:
        """A whole group was dropped: another one starts in its place.

        Raises:
            InvariantError: a group of that batch was never admitted.
        """
        if not 0 <= batch <= self._newest():
            raise InvariantError(
                f"a group of batch {batch} was dropped, but {self._admitted} groups were admitted"
            )
        self._replacements.append(self._version)
