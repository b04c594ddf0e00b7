"""One unit's gradient: the ring of buffers it is collected in, and its way to the shards.

Shapes: a buffer has n elements of a unit; its part of the split over z2 ranks n/z2, of that over z1
n/z1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from asyncflow_hzp.exchange import Exchange
from asyncflow_hzp.lanes import Job
from asyncflow_hzp.layout import Piece
from asyncflow_hzp.unit import Unit

__all__ = ["Ring", "clear_gaps", "reduce", "scatter"]


class Ring:
    """Buffers as large as the largest unit; one that a lane has comes back by its job's event.

    Concurrency: called by the thread that computes.
    """

    def __init__(self, units: Sequence[Unit], *, dtype: torch.dtype, count: int) -> None:
        self._units = units
        self._dtype = dtype
        self._count = count if units else 0
        self._elements = max((unit.elements for unit in units), default=0)
        self._free: list[torch.Tensor] = []
        self._busy: deque[tuple[Job, torch.Tensor]] = deque()
        self._made = 0

    def allocate(self) -> None:
        """Make the buffers if they are not there yet."""
        while self._made < self._count:
            self._free.append(self._new())

    def _new(self) -> torch.Tensor:
        self._made += 1
        return torch.empty(self._elements, dtype=self._dtype, device=self._units[0].device)

    def take(self, unit: Unit) -> torch.Tensor:
        """Room for a unit's gradient [n]; waits for the oldest buffer on its way if all are."""
        if self._free:
            buffer = self._free.pop()
        elif self._busy:
            job, buffer = self._busy.popleft()
            job.wait()
        else:  # all wait for their turn behind a unit that needs one
            buffer = self._new()
        return buffer[: unit.elements]

    def lend(self, buffer: torch.Tensor, job: Job) -> None:
        """A buffer that was taken is in use until the job's end."""
        whole = buffer._base
        self._busy.append((job, buffer if whole is None else whole))

    def clear(self) -> None:
        """Wait for all buffers that are in use."""
        while self._busy:
            job, buffer = self._busy.popleft()
            job.wait()
            self._free.append(buffer)


def clear_gaps(unit: Unit, buffer: torch.Tensor) -> None:
    """Zero what belongs to no parameter."""
    for start, stop in unit.gaps:
        buffer[start:stop].zero_()


def scatter(unit: Unit, exchange: Exchange, buffer: torch.Tensor) -> torch.Tensor:
    """Sum a gradient over z2 ranks; this rank's part [n/z2] of it, which lies in `buffer`."""
    layout, size = unit.layout, unit.layout.sizes.z2
    if size == 1:
        return buffer
    low, high = layout.shard(size, unit.elements)
    part = buffer[low:high]
    exchange.reduce_scatter(buffer, layout.pieces(size, 1, unit.elements), part)
    return part


def reduce(
    unit: Unit,
    exchange: Exchange,
    buffer: torch.Tensor,
    *,
    sums: torch.Tensor | None,
    scale: float,
) -> None:
    """Bring a step's gradient to where the optimizer has its shard, `unit.grad` [n/z1].

    Args:
        unit: whose.
        exchange: the lane's collectives.
        buffer: the last micro-batch's, or all of them.
        sums: this rank's part [n/z2] of the micro-batches before, where they were scattered.
        scale: multiplies the sum.
    """
    layout, (_, z2, z1), grad = unit.layout, unit.layout.sizes, unit.grad
    assert grad is not None
    if z1 == z2 > 1 and sums is None:
        exchange.reduce_scatter(buffer, layout.pieces(z1, 1, unit.elements), grad)
    else:
        part = scatter(unit, exchange, buffer)
        if sums is not None:
            part.add_(sums)
        low, _ = layout.shard(z2, unit.elements)
        pieces = [
            Piece(piece.rank, piece.start - low, piece.stop - low)
            for piece in layout.pieces(z1, z2, unit.elements)
        ]
        exchange.reduce_scatter(part, pieces, grad)
    exchange.all_reduce(grad, layout.replicas)
    if scale != 1.0:
        grad.mul_(scale)
