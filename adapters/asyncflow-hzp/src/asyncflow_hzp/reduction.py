"""When gradients go from autograd to the optimizer's shards, and in which order.

A unit's gradients are copied into a buffer of a ring as autograd delivers them; when the last one
is there, the reduce lane takes the buffer: reduce-scatter over z2 ranks, then over z1/z2, then
all-reduce over the replicas (`gradients`). Units are submitted in one order on every rank: in the
first step the reverse of the model's, then that in which they were complete on the first rank. A
unit that is early waits; what stays incomplete follows when the backward ends. A rank without a
backward submits the same when the step is made.

A backward that is not a step's last adds into an accumulator: of the whole unit, without traffic
("full"), or of its z2-shard, reduced at once ("shard").

Concurrency: called by the thread that computes; buffers come back by their job's event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch

from asyncflow_core.errors import ServiceError
from asyncflow_hzp.exchange import Exchange
from asyncflow_hzp.gradients import Ring, clear_gaps, reduce, scatter
from asyncflow_hzp.lanes import Job, Lane
from asyncflow_hzp.unit import Entry, Unit

__all__ = ["Reduction"]


class _Progress:
    """What one unit's gradient has come to in this step."""

    __slots__ = ("arrived", "buffer", "filled", "job", "summed", "sums")

    def __init__(self) -> None:
        self.sums: torch.Tensor | None = None  # accumulator
        self.summed = False  # whether it holds something
        self.buffer: torch.Tensor | None = None  # what this backward writes to
        self.filled = False  # whether missing entries of the buffer are to be kept
        self.arrived: set[Entry] = set()
        self.job: Job | None = None


class Reduction:
    """The gradients of one model's trainable units.

    Args:
        units: trainable ones.
        lane: carries the reductions.
        exchange: the lane's collectives, for a unit.
        dtype: of buffers and traffic.
        buffers: how many units' gradients may be on their way.
        accumulate: see the module.
        scale: multiplies the sum.
        agree: given an order and whether it was traced, returns the first rank's, if traced.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        lane: Lane,
        exchange: Callable[[Unit], Exchange],
        *,
        dtype: torch.dtype,
        buffers: int,
        accumulate: Literal["full", "shard"],
        scale: float,
        agree: Callable[[list[int], bool], list[int] | None],
    ) -> None:
        self.last = True
        self._units = units
        self._lane = lane
        self._exchange = exchange
        self._dtype = dtype
        self._full = accumulate == "full"
        self._scale = scale
        self._agree = agree
        self._progress = {unit: _Progress() for unit in units}
        self._order: list[Unit] = list(reversed(units))
        self._traced: list[Unit] = []
        self._agreed = False
        self._issued: dict[Unit, None] = {}
        self._in_backward = False
        self._ring = Ring(units, dtype=dtype, count=buffers)
        self.on_end: Callable[[], None] = lambda: None
        for unit in units:
            for entry in unit.entries:
                tensor: Any = entry.param  # torch leaves the method untyped
                tensor.register_post_accumulate_grad_hook(partial(self._arrive, unit, entry))

    @property
    def order(self) -> list[Unit]:
        """Units in the order of their reductions."""
        return self._order

    @property
    def under_way(self) -> bool:
        """Whether this rank has submitted a reduction in this step."""
        return any(progress.job is not None for progress in self._progress.values())

    def allocate(self) -> None:
        """Make the buffers, and the optimizer's gradients, if they are not there yet."""
        self._ring.allocate()
        for unit in self._units:
            if unit.grad is None:
                unit.grad = torch.zeros_like(unit.master)

    def _arrive(self, unit: Unit, entry: Entry, param: torch.Tensor) -> None:
        if not self._in_backward:
            self._begin()
        progress = self._progress[unit]
        grad, param.grad = param.grad, None
        assert grad is not None
        if progress.buffer is None:
            self._open(unit, progress)
        assert progress.buffer is not None
        view = entry.view(progress.buffer)
        if progress.filled or entry in progress.arrived:
            view.add_(grad)
        else:
            view.copy_(grad)
        progress.arrived.add(entry)
        if len(progress.arrived) == len(unit.entries):
            if not self._agreed and unit not in self._traced:
                self._traced.append(unit)
            self._submit_ready()

    def _begin(self) -> None:
        self._in_backward = True
        self.allocate()
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._end)

    def _issues(self, unit: Unit) -> bool:
        """Whether this backward sends the unit's gradient anywhere."""
        return self.last or not (self._full or unit.layout.sizes.z2 == 1)

    def _sums_whole(self, unit: Unit) -> bool:
        return self._full or unit.layout.sizes.z2 == 1

    def _open(self, unit: Unit, progress: _Progress) -> None:
        """Choose what this backward's gradients are written to."""
        again = unit in self._issued and self._issues(unit)
        if again or (progress.job is not None and self.last):
            raise ServiceError(
                f"unit {unit.name!r} got gradients after its reduction; run all backwards of a "
                f"step but the last under no_sync"
            )
        if unit.layout.sizes.z1 == 1 and self._dtype == unit.master_dtype:
            progress.sums = unit.grad  # sum where the optimizer will look for it
        if self._sums_whole(unit) and (
            progress.summed or not self.last or progress.sums is not None
        ):
            if progress.sums is None:
                progress.sums = torch.zeros(unit.elements, dtype=self._dtype, device=unit.device)
            progress.buffer, progress.filled = progress.sums, progress.summed
            if not progress.summed:
                clear_gaps(unit, progress.sums)
            return
        progress.buffer, progress.filled = self._ring.take(unit), False
        clear_gaps(unit, progress.buffer)

    def _submit_ready(self) -> None:
        """Submit complete units as far as the order allows."""
        while len(self._issued) < len(self._order):
            unit = self._order[len(self._issued)]
            if not self._is_complete(unit):
                return
            self._submit(unit)

    def _is_complete(self, unit: Unit) -> bool:
        return unit not in self._issued and len(self._progress[unit].arrived) == len(unit.entries)

    def _submit(self, unit: Unit) -> None:
        """Give a unit's gradient of this backward to the lane, or leave it in its sums."""
        progress = self._progress[unit]
        if progress.buffer is None and self._issues(unit):
            self._open(unit, progress)
        self._issued[unit] = None
        buffer = progress.buffer
        if buffer is not None and not progress.filled:
            for entry in unit.entries:
                if entry not in progress.arrived:
                    entry.view(buffer).zero_()
        if buffer is None or not self._issues(unit):
            self._close(progress)
            return
        work = self._reduce if self.last else self._reduce_partly
        if not self.last and progress.sums is None:
            low, high = unit.layout.shard(unit.layout.sizes.z2, unit.elements)
            progress.sums = torch.zeros(high - low, dtype=self._dtype, device=unit.device)
        job = self._lane.submit(f"unit {unit.name!r}", partial(work, unit, buffer, progress.summed))
        if buffer is not progress.sums:
            self._ring.lend(buffer, job)
        if self.last:
            progress.job = job
        self._close(progress)

    def _close(self, progress: _Progress) -> None:
        """This backward writes no more to the unit's buffer."""
        if not self.last and (progress.buffer is not None):
            progress.summed = True
        progress.buffer = None
        progress.arrived.clear()

    def _reduce_partly(self, unit: Unit, buffer: torch.Tensor, summed: bool) -> None:
        """Add the z2-shard of a micro-batch to what the others left."""
        part = scatter(unit, self._exchange(unit), buffer)
        sums = self._progress[unit].sums
        assert sums is not None
        if summed:
            sums.add_(part)
        else:
            sums.copy_(part)

    def _reduce(self, unit: Unit, buffer: torch.Tensor, summed: bool) -> None:
        """Bring a step's gradient to the optimizer's shard."""
        adds = summed and not self._sums_whole(unit)
        sums = self._progress[unit].sums if adds else None
        reduce(unit, self._exchange(unit), buffer, sums=sums, scale=self._scale)

    def _end(self) -> None:
        """The backward is through."""
        self._in_backward = False
        self._submit_rest()
        self.on_end()

    def _submit_rest(self) -> None:
        """Submit what the backward left incomplete."""
        for unit in self._order:
            if unit not in self._issued:
                self._submit(unit)
        self._issued = {}

    def finish(self) -> None:
        """Submit every unit's reduction that no backward has submitted; all ranks call it."""
        self.allocate()
        if self._units and any(self._progress[unit].job is None for unit in self._units):
            last, self.last = self.last, True
            self._issued = {}  # a backward without traffic that broke off leaves some
            for unit in self._order:
                if self._progress[unit].job is None:
                    self._submit(unit)
            self._issued = {}
            self.last = last
        if not self._agreed:
            self._agree_on_order()

    def _agree_on_order(self) -> None:
        """Take the order in which units were complete on the first rank, once it has one."""
        rest = [unit for unit in self._order if unit not in self._traced]
        places = {unit: at for at, unit in enumerate(self._units)}
        found = self._agree([places[unit] for unit in (*self._traced, *rest)], bool(self._traced))
        if found is not None:
            self._order = [self._units[at] for at in found]
            self._agreed, self._traced = True, []

    def wait(self, unit: Unit) -> torch.Tensor:
        """The unit's reduced gradient, as soon as it is there."""
        job = self._progress[unit].job
        assert job is not None
        job.wait()
        assert unit.grad is not None
        return unit.grad

    def clear(self) -> None:
        """Forget this step's gradients; what is on its way is waited for."""
        for progress in self._progress.values():
            if progress.job is not None:
                progress.job.wait()
            progress.job, progress.buffer, progress.summed = None, None, False
            progress.arrived.clear()
        self._ring.clear()
        self._issued = {}
        self._in_backward = False
