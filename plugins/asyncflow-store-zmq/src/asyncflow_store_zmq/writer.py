"""A stream of puts: the next one is written while the last ones are being acknowledged."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from asyncflow_core.batch import Batch, Column, GroupKey
from asyncflow_core.errors import (
    AsyncFlowError,
    PeerLostError,
    ServiceClosedError,
)
from asyncflow_core.services.data_store import PutResult
from asyncflow_store_zmq.memory import Await, Begin, Call, NoAnswerError, Steps, StreamSteps
from asyncflow_store_zmq.session import Session

__all__ = ["PutStream"]

# Of these an answer may still come, or a next life of the store.
_UNKNOWN = (NoAnswerError, PeerLostError, ServiceClosedError)


@dataclass(slots=True, eq=False)
class _Pending:
    """A put without an answer; `steps` and `handle` are there once it is under way."""

    groups: Batch
    keys: Sequence[GroupKey]
    batch: int | None
    repeated: bool = False
    steps: Steps | None = None
    handle: Any = None
    call: Call | None = None

    def begun(self, steps: Steps, call: Call, handle: Any) -> None:
        """It is under way."""
        self.steps, self.call, self.handle = steps, call, handle


class PutStream:
    """What both writers do, as steps. `again` takes it into the next life of a store."""

    def __init__(
        self,
        session: Session,
        *,
        keeps: bool = False,
        samples: int = 1,
        partition: str = "train",
        row_bytes: int = 0,
        wait_s: float | None = None,
        in_flight: int = 8,
    ) -> None:
        """Nothing put yet.

        Args:
            session: of the client.
            keeps: groups are copied once more, until they are acknowledged: for `again`.
            samples: as for `put`, as what follows.
            partition: tasks that see them.
            row_bytes: reserved.
            wait_s: for room.
            in_flight: most puts without an answer.
        """
        self.session = session
        self._keeps = keeps
        self._how = samples, partition, row_bytes, wait_s
        self._in_flight = in_flight
        self._pending: deque[_Pending] = deque()
        self._stored = self._known = 0

    def note(self, groups: Batch, keys: Sequence[GroupKey], batch: int | None) -> None:
        """A put, which `push` begins."""
        groups = _copy(groups) if self._keeps else groups
        self._pending.append(_Pending(groups, keys, batch))

    def push(self) -> StreamSteps:
        """Begin what was noted; wait where too many have no answer."""
        samples, partition, row_bytes, wait_s = self._how
        for put in list(self._pending):
            if put.steps is not None:
                continue
            steps = self.session.put(
                put.groups, put.keys, samples, put.batch, partition, row_bytes, wait_s
            )
            try:
                call = next(steps)
                while call.method != "store.put":  # memory comes first
                    call = steps.send((yield call))
                yield Begin(call, partial(put.begun, steps, call))
            except BaseException as error:
                if put.handle is None and not isinstance(error, PeerLostError):
                    self._pending.remove(put)
                raise
        if len(self._pending) > self._in_flight:
            # Half of them at a time: whoever waits for each answer alone wakes up for each.
            while len(self._pending) > self._in_flight // 2:
                yield from self._settle()

    def flush(self) -> StreamSteps:
        """Wait for every answer -> PutResult."""
        yield from self.push()
        while self._pending:
            yield from self._settle()
        result = PutResult(self._stored, self._known)
        self._stored = self._known = 0
        return result

    def again(self, session: Session) -> StreamSteps:
        """The store was started again: put again what it did not acknowledge."""
        self.session = session
        for put in self._pending:
            put.repeated, put.steps, put.handle = True, None, None
        yield from self.push()

    def _settle(self) -> StreamSteps:
        put = self._pending[0]
        assert put.steps is not None
        assert put.call is not None
        try:
            reply = yield Await(put.handle, put.call)
        except AsyncFlowError as error:
            if not isinstance(error, _UNKNOWN):
                self._pending.popleft()
                put.steps.close()
            raise  # what was left is waited for again, or put again
        self._pending.popleft()
        try:
            put.steps.send(reply)
        except StopIteration as stop:
            stored, known = stop.value.stored, stop.value.known
            # What a put that is repeated finds there, it has stored.
            self._stored += stored + known if put.repeated else stored
            self._known += 0 if put.repeated else known


def _copy(batch: Batch) -> Batch:
    columns = {}
    for name, column in batch.items():
        offsets = None if column.offsets is None else column.offsets.copy()
        columns[name] = Column(column.values.copy(), offsets)
    return Batch(columns, rows=batch.rows)
