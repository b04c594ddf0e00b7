"""Who is stuck, and who may be started again. Pure but for the clock's source."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable

__all__ = ["Clock", "Restarts", "Watchdog"]


class Clock:
    """Seconds this process ran, without the time it was stopped (Ctrl-Z, SIGSTOP).

    Deadlines of others are measured with it, since they could not be heard meanwhile. Somebody has
    to look at it more often than every `max_gap_s`; a longer silence is a stop.
    """

    def __init__(
        self, source: Callable[[], float] = time.monotonic, *, max_gap_s: float = 5.0
    ) -> None:
        """Start at the source's time."""
        self._source = source
        self._max_gap_s = max_gap_s
        self._seen = source()
        self.stopped_s = 0.0
        """Seconds it stood still, all stops together."""

    def now(self) -> float:
        """The time, never running back."""
        seen = self._source()
        gap, self._seen = seen - self._seen, seen
        if gap > self._max_gap_s:
            self.stopped_s += gap
        return seen - self.stopped_s


class Watchdog:
    """Counts a process as stuck that gave no sign of life for `stuck_s` seconds."""

    def __init__(self, stuck_s: float) -> None:
        """Watch nobody yet."""
        self._stuck_s = stuck_s
        self._seen: dict[str, float] = {}

    def beat(self, name: str, now: float) -> None:
        """It lives; from the first time on it is watched."""
        self._seen[name] = max(now, self._seen.get(name, now))

    def forget(self, name: str) -> None:
        """It is gone, or starts and may take its time."""
        self._seen.pop(name, None)

    def silent_s(self, now: float) -> dict[str, float]:
        """Everybody who is watched, and how long ago it gave its last sign."""
        return {name: now - seen for name, seen in self._seen.items()}

    def stuck(self, now: float) -> list[str]:
        """Those that are to be ended; each is named once."""
        found = [n for n, seconds in self.silent_s(now).items() if seconds >= self._stuck_s]
        for name in found:
            self.forget(name)
        return found


class Restarts:
    """How often a process may die: `limit` times within any `window_s` seconds.

    And `limit` times in a row without progress in between, however long that takes: one that loads
    for minutes, or hangs for an hour, would come back for ever. A stage's process that dies of the
    rows it was given is not at fault, and each row may kill only so many; for it only this holds.
    """

    def __init__(self, limit: int, window_s: float) -> None:
        """Nobody died yet."""
        self.limit = limit
        self.window_s = window_s
        self._deaths: defaultdict[str, deque[float]] = defaultdict(deque)
        self._in_a_row: dict[tuple[str, bool], tuple[int, int]] = {}
        self.count: defaultdict[str, int] = defaultdict(int)
        """Restarts so far, by name."""

    @property
    def total(self) -> int:
        """Restarts so far."""
        return sum(self.count.values())

    def refusal(
        self, name: str, now: float, *, finished: int | None = None, of_rows: bool = False
    ) -> str:
        """It died: why it may not be started again; empty if it may.

        Args:
            name: of the process.
            now: the run's time.
            finished: what counts as progress, rows or steps so far; None: it is not looked at.
            of_rows: it died of its rows, which are counted apart.
        """
        refusal = ""
        if not of_rows and self._within_window(name, now) > self.limit:
            refusal = f"{self.limit} times within {self.window_s:g} s"
        if finished is not None and self._without(name, finished, of_rows) > self.limit:
            refusal = refusal or f"{self.limit} times in a row without progress in between"
        if not refusal:
            self.count[name] += 1
        return refusal

    def _within_window(self, name: str, now: float) -> int:
        deaths = self._deaths[name]
        deaths.append(now)
        while deaths and deaths[0] <= now - self.window_s:
            deaths.popleft()
        return len(deaths)

    def _without(self, name: str, finished: int, of_rows: bool) -> int:
        at, deaths = self._in_a_row.get((name, of_rows), (finished, 0))
        deaths = deaths + 1 if at == finished else 1
        self._in_a_row[name, of_rows] = finished, deaths
        return deaths
