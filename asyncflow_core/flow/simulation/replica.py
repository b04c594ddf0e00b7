"""A rollout replica of a simulated run: sequences decoded side by side, weights taken in. Pure."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from functools import partial

from asyncflow_core.batch import Key
from asyncflow_core.flow.simulation.clock import Clock
from asyncflow_core.flow.simulation.services import Puller, Seen
from asyncflow_core.flow.simulation.times import RolloutTimes
from asyncflow_core.services.data_store import Lease, RowInfo
from asyncflow_core.services.rollout import SwitchMode

__all__ = ["Replica"]


class Replica(Puller):
    """All running sequences go on at one speed, that of their number.

    So one counter of tokens serves them all: a sequence that begins at t tokens and is n long ends
    at t + n, whatever others come and go.
    """

    def __init__(
        self,
        clock: Clock,
        times: RolloutTimes,
        length_of: Callable[[Key], int],
        mode: SwitchMode,
        seen: Seen,
        **fields: object,
    ) -> None:
        """See `Puller`; `length_of` gives the tokens of a response."""
        super().__init__(**fields)  # type: ignore[arg-type]
        self._clock = clock
        self._times = times
        self._length_of = length_of
        self._drains = mode is SwitchMode.DRAIN
        self._seen = seen
        self._serves = 0
        self._running: list[tuple[float, int, Lease, RowInfo, int]] = []
        self._late: list[Lease] = []  # came while it drained: they begin with the new weights
        self._numbers = itertools.count()
        self._tokens = self._at = 0.0
        self._turn = 0
        self._draining = False
        self._then: Callable[[], None] | None = None  # once it has drained
        self.tokens = 0
        """Of all responses that have ended."""

    def version(self) -> int:
        """That it serves."""
        return self._serves

    def commit(self, version: int, seconds: float, done: Callable[[], None]) -> None:
        """Switch, when running sequences have ended if it drains; then tell."""
        self._draining = self._drains
        self._then = partial(self._clock.after, seconds, partial(self._serve, version, done))
        if not (self._draining and self._running):
            self._switch()

    def _switch(self) -> None:
        then, self._then = self._then, None
        if then is not None:
            then()

    def _serve(self, version: int, done: Callable[[], None]) -> None:
        self._serves, self._draining = version, False
        late, self._late = self._late, []
        for lease in late:
            self._start(lease)
        done()
        self.pull()

    def begin(self, lease: Lease) -> None:
        """Run them, or let them wait for the switch that is under way."""
        if self._draining:
            self._late.append(lease)
        else:
            self._start(lease)

    def _start(self, lease: Lease) -> None:
        self._pass()
        for info in lease.rows:
            ends = self._tokens + self._length_of(info.key)
            heapq.heappush(self._running, (ends, next(self._numbers), lease, info, self._serves))
        self._next()

    def _pass(self) -> None:
        """Bring the counter of tokens up to now."""
        now = self._clock.now
        if self._running:
            self._tokens += (now - self._at) / self._times.step_s(len(self._running))
            self.busy.add(self._at, now)
        self._at = now

    def _next(self) -> None:
        """Come back when the next sequence ends, if none comes or goes before."""
        self._turn += 1
        turn = self._turn
        if self._running:
            left = max(0.0, self._running[0][0] - self._tokens)
            seconds = left * self._times.step_s(len(self._running))
            self._clock.after(seconds, lambda: self._ended(turn))

    def _ended(self, turn: int) -> None:
        if turn != self._turn:
            return
        self._pass()
        first = self._running[0][0]
        self._tokens = max(self._tokens, first)
        ended: list[tuple[Lease, RowInfo, int]] = []
        while self._running and self._running[0][0] <= self._tokens:
            _, _, lease, info, version = heapq.heappop(self._running)
            ended.append((lease, info, version))
        self._next()
        self._clock.after(self._times.row_s, lambda: self._finish(ended))
        if not self._running:
            self._switch()

    def _finish(self, ended: Sequence[tuple[Lease, RowInfo, int]]) -> None:
        for lease, info, version in ended:
            tokens = self._length_of(info.key)
            self.tokens += tokens
            self._seen([info])
            self._table.commit(lease, [info], tokens=[tokens], oldest=[version])
        self.done(len(ended))
