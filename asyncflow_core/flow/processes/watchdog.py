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

    A stage's process that dies of the rows it was given is not at fault, and each row may kill only
    so many; it may die so `limit` times in a row without a row finished in between.
    """

    def __init__(self, limit: int, window_s: float) -> None:
        """Nobody died yet."""
        self.limit = limit
        self.window_s = window_s
        self._deaths: defaultdict[str, deque[float]] = defaultdict(deque)
        self._of_rows: dict[str, tuple[int, int]] = {}
        self.count: defaultdict[str, int] = defaultdict(int)
        """Restarts so far, by name."""

    @property
    def total(self) -> int:
        """Restarts so far."""
        return sum(self.count.values())

    def allowed(self, name: str, now: float) -> bool:
        """It died: whether it may be started again."""
        deaths = self._deaths[name]
        deaths.append(now)
        while deaths and deaths[0] <= now - self.window_s:
            deaths.popleft()
        return self._counted(name, len(deaths))

    def allowed_by_rows(self, name: str, finished: int) -> bool:
        """It died of its rows, when its task had `finished` so many: whether it may go on."""
        at, deaths = self._of_rows.get(name, (finished, 0))
        deaths = deaths + 1 if at == finished else 1
        self._of_rows[name] = finished, deaths
        return self._counted(name, deaths)

    def _counted(self, name: str, deaths: int) -> bool:
        allowed = deaths <= self.limit
        if allowed:
            self.count[name] += 1
        return allowed
