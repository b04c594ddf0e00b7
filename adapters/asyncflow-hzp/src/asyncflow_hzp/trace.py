"""In which order units are used: recorded once, then foretold. Pure logic.

A pass is a forward, with or without the backward after it. The first one records; from then on
`upcoming` tells what is needed next, and how far away the next use of a unit is. A pass that goes
another way is followed from wherever it is found in the record, and replaces it when it ends.

What is foretold only decides what is fetched early. It is a function of the program's order alone,
never of time, so that every rank that runs the same program queues the same work in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["NEVER", "Trace"]

NEVER = 1 << 30
"""Distance of a use that is not foreseen."""


class Trace:
    """The order of uses, forward and backward, of units by number."""

    def __init__(self) -> None:
        self._orders: tuple[list[int], list[int]] = ([], [])
        self._recording: list[int] = []
        self._first: object = None
        self._backward = False
        self._at = 0
        self._with_backward = True

    @property
    def order(self) -> tuple[list[int], list[int]]:
        """The recorded forward and backward."""
        return self._orders

    def use(self, unit: int, *, backward: bool, caller: object, grad: bool = True) -> None:
        """Note that a unit is used now.

        Args:
            unit: its number.
            backward: whether this happens in a backward.
            caller: what uses it in a forward; the first caller's return starts a new pass.
            grad: whether a backward will follow this forward.
        """
        again = not backward and (self._first is None or caller is self._first)
        begins = again or backward != self._backward
        if begins:
            self._end_phase()
            self._backward = backward
            if not backward:
                self._first = caller
                self._with_backward = grad
        if self._recording and self._recording[-1] == unit:
            return
        self._recording.append(unit)
        order = self._orders[self._backward]
        at = next((i for i in range(self._at, len(order)) if order[i] == unit), None)
        if at is not None:
            self._at = at + 1

    def end_backward(self) -> None:
        """The backward is through: what comes next is a forward."""
        self._end_phase()
        self._first = None
        self._backward = False

    def _end_phase(self) -> None:
        if self._recording and self._recording != self._orders[self._backward]:
            self._orders[self._backward][:] = self._recording
        self._recording = []
        self._at = 0

    def upcoming(self, *, again: bool = True) -> Iterator[int]:
        """Units in the order they will be used.

        Args:
            again: go on, after a backward, to the next forward; not if parameters change between.
        """
        forward, backward = self._orders
        if self._backward:
            yield from backward[self._at :]
        elif self._recording:
            yield from forward[self._at :]
            if self._with_backward:
                yield from backward
            else:
                again = True
        else:
            again = True
        if again:
            yield from forward
