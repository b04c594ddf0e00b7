"""The default order: the step at version v trains the groups of batch v and waits for all. Pure.

Who may start when is `flow.running.admission`; the data store hands the trainer rows of its batch
alone. So nothing is ever too old, and a row that is shows a bug.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from asyncflow_core.errors import StalenessViolationError
from asyncflow_core.flow.running.policies.sorted_rows import Sorted, staleness
from asyncflow_core.services.data_store import Order, RowInfo

__all__ = ["FixedBatches"]


class FixedBatches:
    """Trains what it gets, and verifies the bound once more where it counts."""

    lease_order: ClassVar[Order] = Order.STEP
    claims_lengths: ClassVar[bool] = True

    def __init__(self, max_staleness: int) -> None:
        """`max_staleness` in versions."""
        self._max_staleness = max_staleness

    def sort(self, version: int, rows: Sequence[RowInfo]) -> Sorted:
        """All of them.

        Raises:
            StalenessViolationError: one is older than the bound, or newer than the step.
        """
        for info in rows:
            found = staleness(version, info)
            if not 0 <= found <= self._max_staleness:
                raise StalenessViolationError(
                    f"row {info.key} of step {version} has a token of version "
                    f"{info.oldest_version}, staleness {found}; max_staleness is "
                    f"{self._max_staleness}"
                )
        return Sorted(train=list(range(len(rows))))
