"""Weights that a trainer announced, and who waits for newer ones."""

from __future__ import annotations

import asyncio
from typing import Any

from asyncflow_store_zmq.pulse import Pulse

__all__ = ["Announced"]


class Announced:
    """The last announcement.

    Attributes:
        last: its version and note; -1 before the first.
    """

    def __init__(self) -> None:
        """None yet."""
        self.last: list[Any] = [-1, None]
        self._pulse = Pulse()

    def announce(self, version: int, note: Any) -> None:
        """New weights are there; the note is for who waits."""
        self.last = [version, note]
        self._pulse.fire()

    async def newer(self, after: int, wait_s: float) -> list[Any] | None:
        """Version and note of weights newer than `after`; None when none came in time."""
        deadline = asyncio.get_running_loop().time() + wait_s
        while self.last[0] <= after:
            if not await self._pulse.wait(deadline):
                return None
        return self.last
