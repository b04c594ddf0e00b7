"""Which units are gathered: a ring of slots, filled ahead of compute.

Slots are allocated once: the i-th is as large as the i-th largest unit. A slot keeps its unit until
the room is needed; then the unit goes whose next use is farthest away, as the trace foretells it
(Belady's rule). What compute will want next is fetched as long as that displaces nothing wanted
earlier. So the last units of a forward stay for the backward, and the first for the next
micro-batch, as far as the ring reaches: more slots, fewer bytes.

Concurrency: called by the thread that computes. All decisions follow its program order, so every
rank submits the same gathers in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from asyncflow_hzp.exchange import Exchange
from asyncflow_hzp.lanes import Lane
from asyncflow_hzp.trace import NEVER, Trace
from asyncflow_hzp.unit import Slot, Unit

__all__ = ["Residency"]


class Residency:
    """The gathered units of one model.

    Args:
        units: all units, by number.
        lane: carries the gathers.
        exchange: the lane's collectives, for a unit.
        slots: how many units may be gathered at a time; at least 2.
        ahead: whether to fetch before compute asks.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        lane: Lane,
        exchange: Callable[[Unit], Exchange],
        *,
        slots: int,
        ahead: bool,
    ) -> None:
        self.trace = Trace()
        self.changes: Callable[[], bool] = lambda: False  # whether an update follows the backward
        self.recomputes = False  # whether a forward runs that the backward will repeat
        self._units = units
        self._lane = lane
        self._exchange = exchange
        self._ahead = ahead
        self._active: list[Unit] = []
        self._node: object = None
        self._by_node: set[Unit] = set()
        sharded = sorted((u for u in units if not u.whole), key=lambda u: -u.elements)
        self.slots: list[Slot] = []
        self._by_storage: dict[int, Slot] = {}
        for unit in sharded[:slots]:
            self._add_slot(unit)

    def _add_slot(self, unit: Unit) -> Slot:
        slot = Slot(torch.empty(unit.elements, dtype=unit.dtype, device=unit.device))
        self.slots.append(slot)
        self._by_storage[slot.buffer.untyped_storage().data_ptr()] = slot
        return slot

    def slot_of(self, tensor: torch.Tensor) -> Slot | None:
        """The slot whose memory a tensor views."""
        return self._by_storage.get(tensor.untyped_storage().data_ptr())

    def enter(self, unit: Unit, caller: object, *, backward: bool, grad: bool) -> None:
        """A module of the unit begins to compute."""
        self._active.append(unit)
        self._need(unit, caller, backward=backward, grad=grad)

    def leave(self, unit: Unit) -> None:
        """The module is through."""
        self._active.remove(unit)

    def recall(self, unit: Unit, node: object) -> torch.Tensor:
        """The gathered unit, for a node of the backward."""
        if node is not self._node:
            self._node = node
            self._by_node.clear()
        self._by_node.add(unit)
        self._need(unit, None, backward=True, grad=True)
        assert unit.slot is not None
        return unit.slot.buffer

    def look(self, unit: Unit) -> torch.Tensor:
        """Gather a unit outside of any pass."""
        if unit.slot is None:
            unit.stale = False
            self._fetch(unit, self._distances(), must=True)
        unit.bind()
        assert unit.slot is not None
        return unit.slot.buffer

    def end_backward(self, *, again: bool) -> None:
        """The backward is through; `again` with the same parameters."""
        self._node = None
        self._by_node.clear()
        self.trace.end_backward()
        if again:
            self.prefetch()

    def _need(self, unit: Unit, caller: object, *, backward: bool, grad: bool) -> None:
        if unit.whole:
            unit.settle()
            return
        self.trace.use(unit.number, backward=backward, caller=caller, grad=grad)
        if unit.slot is None:
            unit.stale = False
            self._fetch(unit, self._distances(), must=True)
        self.prefetch()
        unit.bind()

    def prefetch(self) -> None:
        """Submit gathers of what comes next, as far as there is room."""
        if not self._ahead:
            return
        distances = self._distances()
        for number in distances:
            unit = self._units[number]
            if unit.slot is None and (unit.stale or not self._fetch(unit, distances, must=False)):
                return

    def _distances(self) -> dict[int, int]:
        """Units to come, with the distance of their next use, the nearest first."""
        distances: dict[int, int] = {}
        for distance, number in enumerate(self.trace.upcoming(again=not self.changes())):
            distances.setdefault(number, distance)
        return distances

    def _fetch(self, unit: Unit, distances: dict[int, int], *, must: bool) -> bool:
        slot = self._room(unit, distances, must=must)
        if slot is None:
            return False
        if slot.unit is not None:
            slot.unit.unbind()
        slot.unit, unit.slot = unit, slot
        unit.gathering = self._lane.submit(f"unit {unit.name!r}", partial(self._gather, unit, slot))
        return True

    def _room(self, unit: Unit, distances: dict[int, int], *, must: bool) -> Slot | None:
        fitting = [
            slot
            for slot in self.slots
            if slot.buffer.numel() >= unit.elements and slot.buffer.dtype == unit.dtype
        ]
        free = [slot for slot in fitting if slot.unit is None]
        if free:
            return min(free, key=lambda slot: slot.buffer.numel())
        busy = {*self._active, *self._by_node}
        idle = [(slot, slot.unit) for slot in fitting if slot.unit and slot.unit not in busy]
        if not idle:
            return self._add_slot(unit) if must else None
        slot, other = max(idle, key=lambda pair: distances.get(pair[1].number, NEVER))
        use = distances.get(unit.number, NEVER)
        if not must and distances.get(other.number, NEVER) <= use:
            return None
        return slot

    def _gather(self, unit: Unit, slot: Slot) -> None:
        buffer = slot.buffer[: unit.elements]
        unit.put_own(buffer)
        self._exchange(unit).gather(buffer, unit.gather_pieces)

    def drop(self, units: Iterable[Unit]) -> None:
        """These are about to change: nothing gathered of them is valid until they are published."""
        for unit in units:
            unit.settle()  # a lane may still read the shards that are to be updated
            unit.unbind()
            unit.stale = not unit.whole

    def publish(self, unit: Unit) -> None:
        """Spread an updated master shard over the ranks that share its parameters."""
        unit.put_master()
        if len(unit.publish_pieces) > 1:
            unit.publishing = self._lane.submit(
                f"unit {unit.name!r}",
                lambda: self._exchange(unit).gather(unit.held, unit.publish_pieces),
            )
        unit.stale = False
        self.prefetch()
