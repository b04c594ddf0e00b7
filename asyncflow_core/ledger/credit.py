"""Room in the store: reserved when a group is admitted, given back row by row."""

from __future__ import annotations

from asyncflow_core.errors import BackpressureError, ConfigError
from asyncflow_core.ledger.rows import Admission

__all__ = ["Credit"]


class Credit:
    """Rows and bytes. A group reserves its largest size, so that its commits never wait.

    Attributes:
        rows: reserved rows.
        bytes: reserved bytes.
        capacity_rows: rows there are.
        capacity_bytes: bytes there are.
    """

    __slots__ = ("bytes", "capacity_bytes", "capacity_rows", "rows")

    def __init__(self, capacity_rows: int, capacity_bytes: int) -> None:
        """Nothing reserved."""
        if capacity_rows < 1 or capacity_bytes < 0:
            raise ConfigError(
                f"a store needs capacity_rows >= 1 and capacity_bytes >= 0, "
                f"got {capacity_rows} and {capacity_bytes}"
            )
        self.capacity_rows = capacity_rows
        self.capacity_bytes = capacity_bytes
        self.rows = 0
        self.bytes = 0

    def fits(self, admission: Admission) -> bool:
        """Whether one group of this size fits now; `BackpressureError` if it never will."""
        rows, size = admission.samples, admission.samples * admission.row_bytes
        if rows > self.capacity_rows or size > self.capacity_bytes:
            raise BackpressureError(
                f"a group of {rows} rows and {size} bytes is larger than the whole store "
                f"({self.capacity_rows} rows, {self.capacity_bytes} bytes); raise its capacity"
            )
        return self.rows + rows <= self.capacity_rows and self.bytes + size <= self.capacity_bytes

    def room(self, admission: Admission) -> int:
        """How many groups of this size fit now; `BackpressureError` if none ever will."""
        if not self.fits(admission):
            return 0
        rows, size = admission.samples, admission.samples * admission.row_bytes
        count = (self.capacity_rows - self.rows) // rows
        return min(count, (self.capacity_bytes - self.bytes) // size) if size else count

    def take(self, admission: Admission, rows: int) -> None:
        """Reserve rows of a group (or, negative, give them back)."""
        self.rows += rows
        self.bytes += rows * admission.row_bytes
