"""Who waits for whom: the run's wait-for graph in lines, said when a wait is long, and its end.

The controller waits for one thing at a time (`begin`), others for what they name (`holding`); what
tasks wait for stands in the store's counters. Every wait ends: with what it waits for, with a
deadline of its own, or after `idle_s` seconds in which nothing in the whole run moved.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from asyncflow_core.errors import ServiceTimeoutError
from asyncflow_core.services.data_store import NO_DROPS, DataStore, StoreStats, TaskStats

__all__ = ["SAY_AFTER_S", "WORTH_S", "Batch", "Waits", "said"]

_log = logging.getLogger(__name__)

SAY_AFTER_S = 30.0
"""Whatever takes this long is said to do so, and again each time it passes."""
WORTH_S = 1.0
"""What a holder holds, or nobody takes, for less is the run's normal course."""


@contextlib.asynccontextmanager
async def said(what: str) -> AsyncIterator[None]:
    """Warn each time another `SAY_AFTER_S` passed in the block: where no `Waits` runs."""

    async def say() -> None:
        seconds = 0.0
        while True:
            await asyncio.sleep(SAY_AFTER_S)
            seconds += SAY_AFTER_S
            _log.warning("%s since %.0f s", what, seconds)

    saying = asyncio.create_task(say())
    try:
        yield
    finally:
        saying.cancel()


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step needs: `groups` prompt groups of `size` rows, and who takes them."""

    groups: int
    size: int
    task: str = "train"
    trainer: str = "trainer"


class Waits:
    """What is waited for, watched.

    Concurrency: `run` is one task beside the others.
    """

    def __init__(
        self,
        store: DataStore,
        batch: Batch | None = None,
        *,
        idle_s: float = 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is waited for yet."""
        self._store = store
        self._batch = batch
        self._idle_s = idle_s
        self._clock = clock
        self._what = ""
        self._details: Callable[[], list[str]] = list
        self._step = 0
        self._trained = 0
        self._since = self._said = self._moved = clock()
        self._holding: dict[object, tuple[str, float]] = {}
        self._last: object = None
        self._seen: dict[tuple[str, str], tuple[object, float]] = {}

    def begin(self, what: str, details: Callable[[], list[str]] = list, *, step: int = 0) -> None:
        """Now this is waited for; `details` says more about it when asked.

        Args:
            what: in words.
            details: lines about it.
            step: number of the step that is being trained, where it is one.
        """
        self._what, self._details, self._step = what, details, step
        self._trained = -1
        self._since = self._said = self._clock()

    @contextlib.contextmanager
    def holding(self, what: str) -> Iterator[None]:
        """Somebody waits for this, beside the controller, until the block ends."""
        token = object()
        self._holding[token] = what, self._clock()
        try:
            yield
        finally:
            del self._holding[token]

    def lines(self, stats: StoreStats) -> list[str]:
        """Who waits for whom now, a line each; `stats` are the store's of this moment."""
        now = self._clock()
        if not self._what:
            return []
        found = [*self._main(stats, now), *self._details()]
        found += [f"{what} since {now - since:.0f} s" for what, since in self._holding.values()]
        for name, task in stats.tasks.items():
            if self._batch is None or name != self._batch.task:
                found += self._task(name, task, now)
        if stats.waiting_puts:
            found.append(
                f"prompts wait for room in the data store since "
                f"{self._for(('', ''), stats.waiting_puts > 0, now):.0f} s"
            )
        return found

    async def run(self) -> None:
        """Warn until cancelled.

        Raises:
            ServiceTimeoutError: nothing moved for `idle_s` seconds.
        """
        while True:
            await asyncio.sleep(SAY_AFTER_S / 30)
            stats = await self._ask()
            now, lines = self._clock(), self.lines(stats)
            self._look(stats, now)
            if self._what and now - self._said >= SAY_AFTER_S:
                self._said = now
                _log.warning(
                    "%s is not done after %.0f s; %s",
                    self._what,
                    now - self._since,
                    "; ".join(lines),
                )
            if now - self._moved >= self._idle_s:
                raise ServiceTimeoutError(
                    f"nothing moved for {self._idle_s:g} s: {'; '.join(lines)}; raise "
                    f"watchdog.idle_s if that is the run's pace"
                )

    async def _ask(self) -> StoreStats:
        """What the store says; one that says nothing is waited for as all else is."""
        asked, asking = (
            self._clock(),
            asyncio.ensure_future(self._store.stats(drops_after=NO_DROPS)),
        )
        try:
            while not (await asyncio.wait({asking}, timeout=SAY_AFTER_S))[0]:
                silent_s = self._clock() - asked
                if silent_s >= self._idle_s:
                    raise ServiceTimeoutError(
                        f"the data store did not answer for {silent_s:.0f} s (watchdog.idle_s), "
                        f"while this was waited for: {self._what}",
                        service="data_store",
                    )
                _log.warning("the data store does not answer since %.0f s", silent_s)
            return asking.result()
        finally:
            asking.cancel()

    def _look(self, stats: StoreStats, now: float) -> None:
        """Note whether anything moved."""
        state = (
            self._what,
            {name: (task.committed, task.expired) for name, task in stats.tasks.items()},
            stats.rows_put,
            stats.rows_freed,
            list(self._holding),
        )
        # Who starts something has a deadline of its own for it.
        if state != self._last or self._holding:
            self._last, self._moved = state, now

    def _main(self, stats: StoreStats, now: float) -> list[str]:
        since = now - self._since
        if not self._step or self._batch is None:
            return [f"{self._what}: since {since:.0f} s"]
        batch, task = self._batch, stats.tasks.get(self._batch.task, TaskStats())
        if self._trained < 0:
            self._trained = task.committed
        rows = task.committed - self._trained + task.holders.get(batch.trainer, 0)
        missing = batch.groups - rows // batch.size
        since = self._for(("", batch.trainer), missing, now)
        if missing <= 0:
            return [f"{batch.trainer} trains step {self._step} since {since:.0f} s"]
        holders = _holders(stats.tasks, but=(batch.task, "record"))
        held = f" held by {_and(holders)}" if holders else ""
        groups = "1 group" if missing == 1 else f"{missing} groups"
        return [
            f"{batch.trainer} step {self._step} waits for {groups}{held} since {since:.0f} s",
        ]

    def _task(self, name: str, task: TaskStats, now: float) -> Iterator[str]:
        for holder, rows in task.holders.items():
            since = self._for((name, holder), (task.committed, rows), now)
            if since >= WORTH_S:
                yield f"{name}: {rows} rows held by {holder}, none finished since {since:.0f} s"
        since = self._for((name, ""), (task.ready > 0, task.committed, task.leased), now)
        if task.ready and since >= WORTH_S:
            yield f"{name}: {task.ready} rows ready that nobody takes since {since:.0f} s"

    def _for(self, key: tuple[str, str], value: object, now: float) -> float:
        """Seconds since this value last changed, as far as anybody looked."""
        old, since = self._seen.get(key, (None, now))
        if old != value:
            self._seen[key] = value, now
            return 0.0
        return now - since


def _holders(tasks: Mapping[str, TaskStats], *, but: Sequence[str]) -> list[str]:
    """Who holds rows that are not at the trainer yet."""
    return list(
        dict.fromkeys(
            holder for name, task in tasks.items() if name not in but for holder in task.holders
        )
    )


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
