"""A stream of micro-batches: rows are handed out ahead, and commits ride along with the next ask.

A hand-out may hold several micro-batches: it is read once and cut here. So a step of a training
loop costs at most one message each way, sent and answered while it computes.
"""

from __future__ import annotations

import bisect
import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from asyncflow_core.batch import Batch, BatchRef, Column
from asyncflow_core.errors import (
    AsyncFlowError,
    ConfigError,
    LeaseLostError,
    PeerLostError,
    ServiceClosedError,
    ServiceTimeoutError,
    error_from_code,
)
from asyncflow_core.services.data_store import Lease, RowInfo
from asyncflow_store_zmq.handed import Handed
from asyncflow_store_zmq.memory import Await, Begin, Call, Lent, NoAnswerError, StreamSteps
from asyncflow_store_zmq.session import Session, seconds

__all__ = ["HandoutStream", "MicroBatch", "cut"]

# Of these an answer may still come, or a next life of the store.
_UNKNOWN = (NoAnswerError, PeerLostError, ServiceClosedError)


class MicroBatch:
    """Some rows of a lease and their columns, read already.

    Attributes:
        batch: the columns.
    """

    __slots__ = ("_first", "_handed", "_last", "batch")

    def __init__(self, handed: Handed, first: int, last: int, batch: Batch) -> None:
        """The rows from `first` to `last`, excluded, of a hand-out."""
        self._handed, self._first, self._last = handed, first, last
        self.batch = batch

    def __len__(self) -> int:
        """Rows."""
        return self._last - self._first

    @property
    def lease(self) -> Lease:
        """The lease that holds them, and perhaps others."""
        return self._handed.lease

    @property
    def rows(self) -> tuple[RowInfo, ...]:
        """What the store says of them; made when it is asked for."""
        return self._handed.infos(self._first, self._last)

    @property
    def ref(self) -> BatchRef:
        """Its rows by reference."""
        return self._handed.ref(self._first, self._last)


class _Asked(NamedTuple):
    """A message under way: commits it carries, and the hand-out it asks for."""

    handle: Any
    call: Call
    commits: list[tuple[list[Any], Lent | None]]
    lease: list[Any] | None
    start: float


class _Come(NamedTuple):
    """A hand-out that has come and is not yet cut: its answer, and what asked for it when."""

    reply: list[Any]
    asked: list[Any]
    start: float


class HandoutStream:
    """What both readers do, as steps. `again` takes it into the next life of a store."""

    def __init__(
        self,
        session: Session,
        task: str,
        columns: Sequence[str],
        requester: str,
        *,
        version: int | None = None,
        limit_rows: int | None = None,
        limit_tokens: int | None = None,
        total_rows: int | None = None,
        policy: str = "fifo",
        lease_s: float = 60.0,
        wait_s: float = 60.0,
        prefetch_rows: int = 64,
    ) -> None:
        """Prepare; the first step begins to ask.

        Args:
            session: of the client.
            task: whose rows.
            columns: what to read.
            requester: who reads.
            version: as the task's order wants.
            limit_rows: most rows of a micro-batch.
            limit_tokens: most tokens of a micro-batch; a single row may have more.
            total_rows: rows of the global batch; the stream ends with its last one.
            policy: lease policy.
            lease_s: life of a lease.
            wait_s: longest wait for a micro-batch.
            prefetch_rows: rows handed out ahead of the micro-batch at hand, but for 0 at least
                another micro-batch. Others cannot have them; 0 is for several readers of few rows.
        """
        least = {"prefetch_rows": 0, "limit_rows": 1, "limit_tokens": 1, "total_rows": 0}
        given = {
            "prefetch_rows": prefetch_rows,
            "limit_rows": limit_rows,
            "limit_tokens": limit_tokens,
            "total_rows": total_rows,
        }
        wrong = {n: v for n, v in given.items() if v is not None and v < least[n]}
        if wrong:
            raise ConfigError(f"a reader's numbers are at least {least}, got {wrong}")
        lease_s, wait_s = seconds("lease_s", lease_s), seconds("wait_s", wait_s)
        self.session = session
        self._columns = list(columns)
        self._limit_rows, self._limit_tokens = limit_rows, limit_tokens
        rows = None if limit_rows is None else max(limit_rows, prefetch_rows)
        tokens = limit_tokens if limit_rows is None else None
        self._how: list[Any] = [task, requester, version, rows, tokens, policy, lease_s, wait_s]
        self._left = self._total = math.inf if total_rows is None else total_rows
        # With a limit in tokens only, what a hand-out takes is known when it is there.
        exact = total_rows is None or rows is not None
        self._ahead = 2 if prefetch_rows and exact else 1
        self._asked: deque[_Asked] = deque()
        self._come: _Come | None = None
        self._ready: deque[MicroBatch] = deque()
        self._done: list[tuple[list[Any], Lent | None]] = []
        self._wanted = 0.0  # rows asked for and not yet here
        self._failed: AsyncFlowError | None = None
        self._flushing = False

    def take(self) -> StreamSteps:
        """-> the next micro-batch, in the order of hand-out; None at the end.

        Raises:
            ServiceTimeoutError: no answer yet; what is under way, commits too, is waited
                for when the reader is asked again.
            AsyncFlowError: an earlier commit was refused; the reader goes on if it is asked again.
        """
        while not self._ready:
            yield from self._receive()  # of a step that was cut off
            if self._ready:
                break
            yield from self._ask_ahead()
            if not self._asked:
                break
            asked = yield from self._take()
            late = time.monotonic() >= asked.start + self._how[7]  # else it was hurried
            if asked.lease is not None and late and not self._ready:
                break  # nothing was ready in time
        self._raise_failure()
        if not self._ready:
            yield from self.close()
            return None
        return self._ready.popleft()

    def commit(self, item: MicroBatch, writes: Batch | None, version: int | None) -> StreamSteps:
        """A micro-batch is done; with the columns its task writes."""
        self._done.append((yield from self.session.prepare(item.ref, writes, version)))
        if not self._ready:  # others may be waiting for what it wrote
            yield from self._ask_ahead()
            if self._done:
                yield from self._ask(0)

    def flush(self) -> StreamSteps:
        """Tell the store what is done, and wait until it knows."""
        self._flushing = True
        try:
            if self._done:
                yield from self._ask(0)
            yield from self._receive()
            if any(asked.lease is not None for asked in self._asked):
                # What waits for rows is answered with them, and so are commits that it carries.
                yield from self.session.hurry(self._how[0], self._how[1])
            while self._asked:
                yield from self._take()
        finally:
            self._flushing = False
        self._raise_failure()

    def close(self) -> StreamSteps:
        """Flush, and give back what was handed out ahead."""
        self._left = 0
        try:
            yield from self.flush()
        finally:
            while self._ready:
                yield from self.session.release(self._ready.popleft().ref)

    def again(self, session: Session) -> StreamSteps:
        """The store was started again, and what it handed out before is nobody's any more.

        Raises:
            LeaseLostError: there were commits of which it is not known whether the store has them.
        """
        unread = sum(map(len, self._ready))
        unknown = len(self._done) + sum(len(asked.commits) for asked in self._asked)
        self.session = session
        self._left += unread
        self._wanted = 0.0
        self._come = None
        for kept in (self._ready, self._asked, self._done):
            kept.clear()
        if unknown:
            raise LeaseLostError(
                f"the store was started again while {unknown} commits were on their way to it; "
                f"rows that it does not have are handed out again"
            )
        return
        yield  # steps, as the others

    def _ask_ahead(self) -> StreamSteps:
        while sum(asked.lease is not None for asked in self._asked) < self._ahead:
            room = self._left - self._wanted
            if room <= 0:
                break
            limit = self._how[3]
            yield from self._ask(min(room, math.inf if limit is None else limit))

    def _ask(self, rows: float) -> StreamSteps:
        commits = self._done
        asking: list[Any] | None = None
        wait_s = 0.0
        if rows:
            asking, wait_s = list(self._how), self._how[7]
            asking[3] = None if rows == math.inf else int(rows)
        call = Call("store.turn", [[message for message, _ in commits], asking], wait_s)
        start = time.monotonic()

        def note(handle: Any) -> None:
            self._done = []
            self._wanted += (asking[3] or 0) if asking else 0
            self._asked.append(_Asked(handle, call, commits, asking, start))

        yield Begin(call, note)

    def _take(self) -> StreamSteps:
        """Take the next answer -> what it answers."""
        asked = self._asked[0]
        answers: list[Any] = [()] * len(asked.commits)
        reply = None
        try:
            answers, reply = yield Await(asked.handle, asked.call)
        except AsyncFlowError as error:
            # It stays, with the commits it carries, while somebody may know what became of them.
            if not isinstance(error, _UNKNOWN):
                self._settle(asked, answers)
            raise
        self._settle(asked, answers)
        if asked.lease is not None and reply is not None:
            self._come = _Come(reply, asked.lease, asked.start)
            yield from self._receive()
        return asked

    def _settle(self, asked: _Asked, answers: Sequence[Any]) -> None:
        """A message was answered, and with it the commits it carried: () where nobody knows how."""
        self._asked.popleft()
        for (message, lent), answer in zip(asked.commits, answers, strict=True):
            done = len(answer) == 4
            self.session.settle(message, lent, answer[3] if done else None)
            if not done and answer:
                self._failed = error_from_code(*answer)
        if asked.lease is not None:
            self._wanted -= asked.lease[3] or 0

    def _receive(self) -> StreamSteps:
        """Read the hand-out that has come, if any, as much as is left to read, and cut it.

        Whatever cuts this off, the hand-out stays, to be read by the next step.
        """
        if self._come is None:
            return
        try:
            handed: Handed = yield from self.session.receive(*self._come)
            ends = handed.ends()
            fits = bisect.bisect_right(ends, self._left) if self._left > 0 else 0  # else closing
            count = ends[fits - 1] if fits else 0
            if count < len(handed):
                yield from self.session.release(handed.ref(count))
                if self._left > 0:
                    self._close_before_group(count)
            if count:
                # Whole groups rarely make exactly what was asked.
                more = 2 * len(handed) >= (self._come.asked[3] or 0)
                batch = yield from self._read(handed, count, more=more)
                self._left -= count
                self._cut(handed, ends, count, batch)
        except AsyncFlowError as error:
            if not isinstance(error, (ServiceTimeoutError, *_UNKNOWN)):
                self._come = None  # others of the total take their place
            raise
        self._come = None

    def _read(self, handed: Handed, count: int, *, more: bool) -> StreamSteps:
        """The columns of its first rows; what is asked ahead meanwhile goes beyond them.

        There may be `more` to hand out. Where there was not, the reader waits for every row, and
        gets these first; the next ask can then wait for their commit, to carry it.
        """
        self._wanted += count
        try:
            more = more and not self._flushing  # which would wait for those, too
            if more and not any(other.lease is not None for other in self._asked):
                # Before the copying, so that the store works meanwhile. It does where it was asked
                # twice.
                yield from self._ask_ahead()
            return (yield from self._reading(handed, count))
        except LeaseLostError:  # for some of the rows perhaps
            yield from self.session.release(handed.ref(0, count))
            raise
        finally:
            self._wanted -= count

    def _reading(self, handed: Handed, count: int) -> StreamSteps:
        if count == len(handed):
            return self.session.read_handed(handed, self._columns)
        return self.session.read(handed.ref(0, count), self._columns)

    def _close_before_group(self, count: int) -> None:
        """The next group does not fit into what is left of the total, beyond these rows."""
        if not count and self._left == self._total:
            self._failed = self._failed or ConfigError(
                f"a reader of whole groups takes a total_rows of at least one group, got "
                f"{self._total:g}, and the next group is larger"
            )
        self._left = count

    def _cut(self, handed: Handed, ends: Sequence[int], count: int, batch: Batch) -> None:
        tokens = None if self._limit_tokens is None else handed.tokens
        first = 0
        while first < count:
            last = self._end(ends, tokens, first, count)
            part = batch if last - first == count else cut(batch, first, last)
            self._ready.append(MicroBatch(handed, first, last, part))
            first = last

    def _end(self, ends: Sequence[int], tokens: list[int] | None, first: int, count: int) -> int:
        """Where the micro-batch that begins at `first` ends: a row or group later at least."""
        limit = count if self._limit_rows is None else min(count, first + self._limit_rows)
        at = bisect.bisect_right(ends, first)
        last = max(at, bisect.bisect_right(ends, limit) - 1)
        if tokens is None or self._limit_tokens is None:
            return ends[last]
        total = sum(tokens[first : ends[at]])
        while at < last:
            total += sum(tokens[ends[at] : ends[at + 1]])
            if total > self._limit_tokens:
                break
            at += 1
        return ends[at]

    def _raise_failure(self) -> None:
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed


def cut(batch: Batch, first: int, last: int) -> Batch:
    """Neighbouring rows, as views."""
    columns = {}
    for name, column in batch.items():
        if column.offsets is None:
            columns[name] = Column(column.values[first:last])
        else:
            offsets = column.offsets[first : last + 1]
            start = offsets[0]
            columns[name] = Column(column.array[start : offsets[-1]], offsets - start)
    return Batch(columns, rows=last - first)
