"""A stream of puts: the next one is written while the last ones are being acknowledged."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from asyncflow_core.batch import Batch, GroupKey
from asyncflow_core.services.data_store import PutResult
from asyncflow_store_zmq.memory import Call, Steps
from asyncflow_store_zmq.session import Session

__all__ = ["Writer"]


class Writer:
    """Puts without waiting for each answer; at most `in_flight` are without one.

    What the store refuses is raised by a later `put`, at the latest by `flush`. A group is stored
    for sure once `flush` has returned. A full store stops the writer: that is its backpressure.

    Concurrency: as its client's.
    """

    def __init__(
        self,
        session: Session,
        send: Callable[[Call], int],
        wait: Callable[[int, Call], Any],
        *,
        samples: int = 1,
        partition: str = "train",
        row_bytes: int = 0,
        wait_s: float | None = None,
        in_flight: int = 8,
    ) -> None:
        """Prepare; build it with the client's `writer`. The arguments are those of `put`."""
        self._session = session
        self._send, self._wait = send, wait
        self._how = samples, partition, row_bytes, wait_s
        self._in_flight = in_flight
        self._asked: deque[tuple[int, Call, Steps]] = deque()
        self._stored = self._known = 0

    def put(self, groups: Batch, *, keys: Sequence[GroupKey], batch: int | None = None) -> None:
        """Begin to store prompt groups; their columns are copied before this returns."""
        samples, partition, row_bytes, wait_s = self._how
        steps = self._session.put(groups, keys, samples, batch, partition, row_bytes, wait_s)
        call = next(steps)
        while call.method != "store.put":  # memory comes first
            call = steps.send(self._wait(self._send(call), call))
        self._asked.append((self._send(call), call, steps))
        if len(self._asked) > self._in_flight:
            # Half of them at a time: whoever waits for each answer alone wakes up for each.
            while len(self._asked) > self._in_flight // 2:
                self._settle()

    def flush(self) -> PutResult:
        """Wait for every answer; what all puts since the last flush did."""
        while self._asked:
            self._settle()
        result = PutResult(self._stored, self._known)
        self._stored = self._known = 0
        return result

    def _settle(self) -> None:
        number, call, steps = self._asked.popleft()
        try:
            reply = self._wait(number, call)
        except BaseException:
            steps.close()
            raise
        try:
            steps.send(reply)
        except StopIteration as stop:
            self._stored += stop.value.stored
            self._known += stop.value.known
