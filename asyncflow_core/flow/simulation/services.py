"""Workers of a simulated run: they pull rows as a `Worker` does; stages take them in turn. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from asyncflow_core.flow.simulation.clock import Clock
from asyncflow_core.flow.simulation.table import Table
from asyncflow_core.flow.simulation.times import StageTimes
from asyncflow_core.services.data_store import Lease, RowInfo, TaskSpec

__all__ = ["Busy", "Puller", "Seen", "StageWorker"]

Seen = Callable[[Sequence[RowInfo]], None]
"""Is told of rows that were committed."""


class Busy:
    """Seconds in which something went on, by the clock; `between` cuts a window out."""

    def __init__(self) -> None:
        """Nothing yet."""
        self._spans: list[tuple[float, float]] = []

    def add(self, start: float, end: float) -> None:
        """A span that begins no earlier than any before it; joined to the last where they meet."""
        if self._spans and start <= self._spans[-1][1]:
            first, last = self._spans[-1]
            self._spans[-1] = first, max(last, end)
        else:
            self._spans.append((start, end))

    def between(self, start: float, end: float) -> float:
        """Seconds of it in a window."""
        return sum(max(0.0, min(end, e) - max(start, s)) for s, e in self._spans)


class Puller:
    """Takes rows as it has room: by an eighth of it at a time, as `Worker` does."""

    def __init__(
        self,
        table: Table,
        task: TaskSpec,
        name: str,
        *,
        rows_in_flight: int,
        rows_per_lease: int,
        policy: str,
        share: tuple[int, int] | None = None,
    ) -> None:
        """Nothing is pulled before the first `pull`."""
        self._table = table
        self._task = task
        self.name = name
        self._rows_in_flight = rows_in_flight
        self._rows_per_lease = rows_per_lease
        self._policy = policy
        self._share = share
        self._held = 0
        self._waits = False
        self.busy = Busy()

    def version(self) -> int | None:
        """That it leases with."""
        return None

    def pull(self) -> None:
        """Take rows as long as there are some and there is room; then wait for more."""
        while self._rows_in_flight - self._held >= max(1, self._rows_in_flight // 8):
            lease = self._lease(min(self._rows_per_lease, self._rows_in_flight - self._held))
            if lease is None:
                self._wait()
                return
            self._held += len(lease.rows)
            self.begin(lease)

    def begin(self, lease: Lease) -> None:
        """Work on leased rows."""
        raise NotImplementedError

    def done(self, rows: int) -> None:
        """So many rows are committed: there is room again."""
        self._held -= rows
        self.pull()

    def _wait(self) -> None:
        if not self._waits:
            self._waits = True
            self._table.wait(self._task.name, self._again)

    def _again(self) -> None:
        self._waits = False
        self.pull()

    def _lease(self, limit: int) -> Lease | None:
        reach = limit * (1 if self._share is None else self._share[1])
        while True:
            lease = self._table.lease(
                self._task.name,
                self.name,
                version=self.version(),
                limit_rows=reach,
                policy=self._policy,
            )
            if lease is None or self._share is None:
                return lease
            mine = self._mine(lease, limit, *self._share)
            if mine or len(lease.rows) < reach:
                return replace(lease, rows=mine) if mine else None
            reach *= 2

    def _mine(self, lease: Lease, limit: int, number: int, count: int) -> tuple[RowInfo, ...]:
        """Of a lease, what falls to this one by its key; the rest goes back."""
        mine = [i for i in lease.rows if (i.key.sequence + i.key.sample) % count == number][:limit]
        taken = {info.row for info in mine}
        self._table.release(lease, [info for info in lease.rows if info.row not in taken])
        return tuple(mine)


class StageWorker(Puller):
    """Works on one lease after the other; the next one waits beside it."""

    def __init__(self, clock: Clock, times: StageTimes, seen: Seen, **fields: object) -> None:
        """See `Puller`."""
        super().__init__(**fields)  # type: ignore[arg-type]
        self._clock = clock
        self._times = times
        self._seen = seen
        self._free_at = 0.0

    def begin(self, lease: Lease) -> None:
        """Done when what it holds is done, and this."""
        start = max(self._clock.now, self._free_at)
        tokens = sum(info.tokens for info in lease.rows)
        self._free_at = start + self._times.seconds(len(lease.rows), tokens)
        self.busy.add(start, self._free_at)
        self._clock.at(self._free_at, lambda: self._end(lease))

    def _end(self, lease: Lease) -> None:
        self._seen(lease.rows)
        self._table.commit(lease, lease.rows)
        self.done(len(lease.rows))
