"""Saying what a run waits for when it waits long, and who holds the rows."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from asyncflow_core.services.data_store import DataStore, StoreStats, TaskStats

__all__ = ["SAY_AFTER_S", "Waits"]

_log = logging.getLogger(__name__)

SAY_AFTER_S = 30.0
"""Whatever takes this long is said to do so, and again each time it passes."""


class Waits:
    """The one thing the controller waits for, watched.

    Concurrency: `run` is one task beside the others.
    """

    def __init__(self, store: DataStore) -> None:
        """Nothing is waited for yet."""
        self._store = store
        self._what = ""
        self._details: Callable[[], list[str]] = list
        self._since = self._said = 0.0

    def begin(self, what: str, details: Callable[[], list[str]] = list) -> None:
        """Now this is waited for; `details` says more about it when asked."""
        self._what, self._details = what, details
        self._since = self._said = time.monotonic()

    def lines(self, stats: StoreStats) -> list[str]:
        """Who waits for whom now, a line each; `stats` are the store's of this moment."""
        if not self._what:
            return []
        seconds = time.monotonic() - self._since
        found = [f"{self._what} waits since {seconds:.0f} s", *self._details()]
        return [*found, *(f"{name}: {_words(task)}" for name, task in stats.tasks.items())]

    async def run(self) -> None:
        """Warn until cancelled."""
        while True:
            await asyncio.sleep(SAY_AFTER_S / 30)
            now = time.monotonic()
            if self._what and now - self._said >= SAY_AFTER_S:
                self._said = now
                stats = await self._store.stats()
                words = [*self._details(), *(f"{n}: {_words(t)}" for n, t in stats.tasks.items())]
                _log.warning(
                    "%s is not done after %.0f s; %s",
                    self._what,
                    now - self._since,
                    "; ".join(words),
                )


def _words(task: TaskStats) -> str:
    held = [f"{rows} held by {holder}" for holder, rows in task.holders.items()]
    return ", ".join([f"{task.ready} rows ready", *held])
