"""What an order of training says of leased rows. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from asyncflow_core.services.data_store import Order, RowInfo

__all__ = ["Sorted", "TrainOrder", "staleness"]


def staleness(version: int, info: RowInfo) -> int:
    """Of a row in the step at `version`, in versions; 0 for one without a response."""
    return 0 if info.oldest_version is None else version - info.oldest_version


@dataclass(frozen=True, slots=True)
class Sorted:
    """Indices of leased rows.

    Attributes:
        train: they are trained.
        mask: they count for the step, and add nothing to it.
        drop: they are taken out, with `reason`.
        reason: why.
    """

    train: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    drop: list[int] = field(default_factory=list)
    reason: str = ""


class TrainOrder(Protocol):
    """Sorts what the trainer leased.

    Attributes:
        lease_order: of the trainer's task, as the data store hands out.
        claims_lengths: whether trained lengths have the data's distribution.
    """

    lease_order: ClassVar[Order]
    claims_lengths: ClassVar[bool]

    def sort(self, version: int, rows: Sequence[RowInfo]) -> Sorted:
        """Sort whole groups leased for the step at `version`; no row of `train` is too old."""
