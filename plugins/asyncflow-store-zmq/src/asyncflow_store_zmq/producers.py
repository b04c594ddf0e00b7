"""Producers that wait for room: in line, and the first one for what comes free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from asyncflow_core.errors import ServiceTimeoutError
from asyncflow_store_zmq.incoming import Incoming
from asyncflow_store_zmq.pulse import Pulse

__all__ = ["Producers"]


class Producers:
    """The line.

    Attributes:
        turn: taken while somebody waits for room; who comes then waits behind.
        waiting: how many.
    """

    def __init__(self, advance: Callable[[Incoming], bool], follow: Callable[[], None]) -> None:
        """Nobody waits.

        Args:
            advance: stores groups as far as there is room; True when all are dealt with.
            follow: does what follows from what was stored.
        """
        self._advance, self._follow = advance, follow
        self._room = Pulse()
        self.turn = asyncio.Lock()
        self.waiting = 0

    def room(self) -> None:
        """Some came free."""
        self._room.fire()

    async def wait(self, put: Incoming, wait_s: float | None) -> None:
        """Until all groups of a put are dealt with.

        Raises:
            ServiceTimeoutError: they were not within `wait_s`.
        """
        self.waiting += 1
        try:
            async with asyncio.timeout(wait_s), self.turn:
                while not self._advance(put):
                    self._follow()
                    await self._room.wait(None)
        except TimeoutError:
            raise ServiceTimeoutError(
                f"put waited {wait_s} s for room; {put.stored} of {len(put.keys)} groups are "
                f"stored; put the same groups again, stored ones are skipped"
            ) from None
        finally:
            self.waiting -= 1
