"""Virtual time: what is due, in order. Pure."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

__all__ = ["Clock"]


class Clock:
    """Calls functions at their time; of one time, in the order in which they were asked for.

    Attributes:
        now: seconds.
    """

    def __init__(self) -> None:
        """At 0, with nothing due."""
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Call at a time, not before now."""
        heapq.heappush(self._due, (max(when, self.now), next(self._numbers), call))

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call so much later."""
        self.at(self.now + seconds, call)

    def step(self) -> bool:
        """Go on to what is due next; False when nothing is."""
        if not self._due:
            return False
        self.now, _, call = heapq.heappop(self._due)
        call()
        return True
