"""Which prompt groups may start, and to which global batch they belong. Pure.

Batches are fixed at admission: the i-th group belongs to batch i // groups_per_step, and batch b is
admitted once version >= b - max_staleness. A dropped group is replaced in its own batch.
"""

from __future__ import annotations

from collections import deque

from asyncflow_core.errors import InvariantError

__all__ = ["Admission"]


class Admission:
    """Counts groups into batches as versions complete."""

    def __init__(
        self, *, groups_per_step: int, steps: int, max_staleness: int, version: int = 0
    ) -> None:
        """Start with `version` completed steps; batches `version .. steps - 1` are to be trained.

        Args:
            groups_per_step: prompt groups of a batch.
            steps: batches of the whole run.
            max_staleness: how many versions a batch may be admitted ahead of its step.
            version: completed steps.
        """
        self._groups_per_step = groups_per_step
        self._steps = steps
        self._max_staleness = max_staleness
        self._version = version
        self._admitted = version * groups_per_step
        self._replacements: deque[int] = deque()

    def advance(self, version: int) -> None:
        """A step completed; `version` grows by one.

        Raises:
            InvariantError: any other value.
        """
        if version != self._version + 1:
            raise InvariantError(f"version goes from {self._version} to {version}, not one further")
        self._version = version

    def replace(self, batch: int) -> None:
        """A whole group of an admitted, untrained batch was dropped: its place is free again.

        Raises:
            InvariantError: the batch was never admitted, or is trained already.
        """
        if not self._version <= batch <= self._newest():
            raise InvariantError(
                f"a group of batch {batch} was dropped, but the batches admitted and not yet "
                f"trained are {list(range(self._version, self._newest() + 1))}"
            )
        self._replacements.append(batch)

    def _newest(self) -> int:
        """The last batch that a group was admitted to; -1 before the first."""
        return (self._admitted - 1) // self._groups_per_step

    def next(self) -> int | None:
        """The batch that the next prompt group goes to; None while none may start."""
        if self._replacements:
            return self._replacements.popleft()
        last = min(self._steps - 1, self._version + self._max_staleness)
        batch = self._admitted // self._groups_per_step
        if batch > last:
            return None
        self._admitted += 1
        return batch
