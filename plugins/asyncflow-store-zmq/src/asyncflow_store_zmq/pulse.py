"""Waiting inside the controller."""

from __future__ import annotations

import asyncio

__all__ = ["Pulse"]


class Pulse:
    """Something waiters wait for, again and again."""

    def __init__(self) -> None:
        """Nobody waits."""
        self._event = asyncio.Event()

    async def wait(self, deadline: float | None) -> bool:
        """Until the next `fire`; False when the loop's time passes `deadline` first."""
        loop = asyncio.get_running_loop()
        if deadline is not None and deadline <= loop.time():
            return False
        try:
            async with asyncio.timeout_at(deadline):
                await self._event.wait()
        except TimeoutError:
            return False
        return True

    def fire(self) -> None:
        """Wake all who wait now (`set` resolves their futures at once)."""
        self._event.set()
        self._event.clear()
