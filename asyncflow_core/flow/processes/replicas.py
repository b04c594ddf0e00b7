"""The rollout replicas of a run, which come and go, as one."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from asyncflow_core.batch import Key
from asyncflow_core.errors import ServiceError
from asyncflow_core.flow.processes.control import RolloutControl, WorkStats
from asyncflow_core.flow.processes.watchdog import Watchdog
from asyncflow_core.services.rollout import RolloutStats

__all__ = ["Replicas"]

_ANSWER_S = 5.0
"""Seconds a replica has to say what it did."""


class Replicas:
    """Sums over all replicas, over all their lives; ends those that make no progress."""

    def __init__(
        self,
        controls: Mapping[str, RolloutControl],
        end: Callable[[str, str], Awaitable[None]],
        *,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Of connected replicas.

        Args:
            controls: by name.
            end: ends one, by name, for a reason.
            timeout_s: seconds one that holds rows may neither generate a token nor finish a row.
            clock: the run's time.
        """
        self._end, self._timeout_s, self._clock = end, timeout_s, clock
        self._watchdog = Watchdog(timeout_s)
        self._work: dict[str, WorkStats] = {}
        self._controls: dict[str, RolloutControl] = dict(controls)
        self._last: dict[str, RolloutStats] = {}
        self._gone: list[RolloutStats] = []
        self._asking: dict[str, tuple[float, asyncio.Task[None]]] = {}
        self.count = len(controls)
        """Replicas of the plan."""

    def left(self, name: str) -> int:
        """A replica died.

        Returns:
            Tokens of responses that it had begun, as far as known: they are generated again.
        """
        self._controls.pop(name, None)
        if (asking := self._asking.pop(name, None)) is not None:
            asking[1].cancel()
        self._watchdog.forget(name)
        self._work.pop(name, None)
        last = self._last.pop(name, RolloutStats())
        self._gone.append(last)
        return last.tokens_unfinished

    def back(self, name: str, control: RolloutControl) -> None:
        """It answers again, and counts from 0."""
        self._controls[name] = control

    async def run(self) -> None:
        """Look once a second, until cancelled: what a dead one had begun is known to so much."""
        try:
            while True:
                await self.look()
                await self.end_stuck()
                await asyncio.sleep(1.0)
        finally:
            for _, asking in self._asking.values():
                asking.cancel()

    async def look(self) -> None:
        """Ask all at once; one that does not answer keeps what it said last.

        Whoever owes an answer for long is not waited for again, and not asked before it came.
        """
        now = asyncio.get_running_loop().time()
        for name, control in self._controls.items():
            if name not in self._asking or self._asking[name][1].done():
                self._asking[name] = now, asyncio.create_task(self._ask(name, control))
        asked = [task for since, task in self._asking.values() if now - since < _ANSWER_S]
        if asked:
            for task in (await asyncio.wait(asked, timeout=_ANSWER_S))[0]:
                if not task.cancelled():
                    task.result()

    async def _ask(self, name: str, control: RolloutControl) -> None:
        with contextlib.suppress(ServiceError):  # dead or about to be: its end is seen elsewhere
            work = await control.work()
            if self._controls.get(name) is control:
                before = self._work.get(name)
                self._work[name] = work
                if not work.held or before is None or work.rows != before.rows:
                    self._watchdog.beat(name, self._clock())
            stats = await control.stats()
            if self._controls.get(name) is control:
                tokens = self._last.get(name, RolloutStats()).tokens_generated
                self._last[name] = stats
                if stats.tokens_generated != tokens:
                    self._watchdog.beat(name, self._clock())

    async def end_stuck(self) -> None:
        """End whoever made no progress for too long; its rows go to others."""
        for name in self._watchdog.stuck(self._clock()):
            await self._end(
                name,
                f"{name} generated no token and finished none of the {self._work[name].held} rows "
                f"it holds for {self._timeout_s:g} s (rollout.timeout_s)",
            )

    async def abort(self, keys: Sequence[Key]) -> None:
        """Stop responses whose rows are dropped, wherever they run."""
        for control in list(self._controls.values()):
            # One that is dead or about to be has stopped them; its end is seen elsewhere.
            with contextlib.suppress(ServiceError):
                await control.abort(keys)

    async def totals(self) -> RolloutStats:
        """Counters of all, those included that are gone."""
        await self.look()
        found = [*self._gone, *self._last.values()]
        return RolloutStats(
            tokens_generated=sum(stats.tokens_generated for stats in found),
            busy_s=sum(stats.busy_s for stats in found),
            tokens_kept=sum(stats.tokens_kept for stats in found),
            tokens_lost=sum(stats.tokens_lost for stats in found),
        )
