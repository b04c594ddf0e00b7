"""A stream of micro-batches: rows are handed out ahead, and commits ride along with the next ask.

A hand-out may hold several micro-batches: it is read once and cut here. So a step of a training
loop costs at most one message each way, sent and answered while it computes.
"""

from __future__ import annotations

import bisect
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from asyncflow_core.batch import Batch, BatchRef, Column
from asyncflow_core.errors import AsyncFlowError, ConfigError, error_from_code
from asyncflow_core.services.data_store import Lease, RowInfo
from asyncflow_store_zmq.handed import Handed
from asyncflow_store_zmq.memory import Call, Lent, Steps
from asyncflow_store_zmq.session import Session

__all__ = ["MicroBatch", "Reader", "cut"]


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

    number: int
    call: Call
    commits: list[tuple[list[Any], Lent | None]]
    lease: list[Any] | None
    start: float


class Reader:
    """Yields `MicroBatch`es until `total_rows` were handed out, exactly.

    A task of whole groups gets them whole here too: no micro-batch ends inside one, and the stream
    ends before a group that would go beyond the total.

    Without a total, until it is closed or nothing was ready for `wait_s`.

    `commit` says that a micro-batch is done. The store learns it with the next message; what it
    refuses then (a lost lease) is raised by a later step, at the latest by `close`.

    Concurrency: as its client's.
    """

    def __init__(
        self,
        session: Session,
        run: Callable[[Steps], Any],
        send: Callable[[Call], int],
        wait: Callable[[int, Call], Any],
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
        """Prepare; the first step begins to ask. Build it with the client's `reader`.

        Args:
            session: of the client.
            run: makes the calls of some steps.
            send: begins a call.
            wait: waits for one.
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
        if prefetch_rows < 0 or (limit_rows is not None and limit_rows < 1):
            raise ConfigError(
                f"a reader takes prefetch_rows >= 0 and limit_rows >= 1, got {prefetch_rows} and "
                f"{limit_rows}"
            )
        self._session = session
        self._run, self._send, self._wait = run, send, wait
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
        self._ready: deque[MicroBatch] = deque()
        self._done: list[tuple[list[Any], Lent | None]] = []
        self._wanted = 0.0  # rows asked for and not yet here
        self._failed: AsyncFlowError | None = None

    def __iter__(self) -> Iterator[MicroBatch]:
        """Itself."""
        return self

    def __next__(self) -> MicroBatch:
        """The next micro-batch, in the order of hand-out.

        Raises:
            AsyncFlowError: an earlier commit was refused; the reader goes on if it is asked again.
        """
        while not self._ready:
            self._ask_ahead()
            if not self._asked:
                break
            asked = self._asked.popleft()
            if not self._take(asked) and asked.lease is not None and not self._ready:
                break  # nothing was ready in time
        self._raise_failure()
        if not self._ready:
            self.close()
            raise StopIteration
        return self._ready.popleft()

    def commit(
        self, item: MicroBatch, writes: Batch | None = None, version: int | None = None
    ) -> None:
        """A micro-batch is done; with the columns its task writes."""
        self._done.append(self._run(self._session.prepare(item.ref, writes, version)))
        if not self._ready:  # others may be waiting for what it wrote
            self._ask_ahead()
            if self._done:
                self._ask(0)

    def flush(self) -> None:
        """Tell the store what is done, and wait until it knows."""
        if self._done:
            self._ask(0)
        while self._asked:
            self._take(self._asked.popleft())
        self._raise_failure()

    def close(self) -> None:
        """Flush, and give back what was handed out ahead."""
        self._left = 0
        try:
            if any(asked.lease is not None for asked in self._asked):
                self._run(self._session.hurry(self._how[0], self._how[1]))
            self.flush()
        finally:
            while self._ready:
                self._run(self._session.release(self._ready.popleft().ref))

    def _ask_ahead(self) -> None:
        while sum(asked.lease is not None for asked in self._asked) < self._ahead:
            room = self._left - self._wanted
            if room <= 0:
                break
            limit = self._how[3]
            self._ask(min(room, math.inf if limit is None else limit))

    def _ask(self, rows: float) -> None:
        commits, self._done = self._done, []
        asking: list[Any] | None = None
        wait_s = 0.0
        if rows:
            asking, wait_s = list(self._how), self._how[7]
            asking[3] = None if rows == math.inf else int(rows)
            self._wanted += asking[3] or 0
        call = Call("store.turn", [[message for message, _ in commits], asking], wait_s)
        start = time.monotonic()
        self._asked.append(_Asked(self._send(call), call, commits, asking, start))

    def _take(self, asked: _Asked) -> bool:
        """Take an answer; False when it handed nothing out."""
        answers, reply = self._wait(asked.number, asked.call)
        for (message, lent), answer in zip(asked.commits, answers, strict=True):
            refused = len(answer) == 2
            self._session.settle(message, lent, None if refused else answer[3])
            if refused:
                self._failed = error_from_code(*answer)
        if asked.lease is None or reply is None:
            self._wanted -= (asked.lease or [0] * 4)[3] or 0
            return False
        self._wanted -= asked.lease[3] or 0
        handed = self._run(self._session.receive(reply, asked.lease, asked.start))
        ends = handed.ends()
        fits = bisect.bisect_right(ends, self._left) if self._left > 0 else 0  # else closing
        count = ends[fits - 1] if fits else 0
        if count < len(handed):
            self._run(self._session.release(handed.ref(count)))
            if self._left > 0:
                self._close_before_group(count)
        if not count:
            return False
        self._left -= count
        self._ask_ahead()  # before the copying, so that the store works meanwhile
        try:
            batch = self._run(self._session.read(handed.ref(0, count), self._columns))
        except AsyncFlowError:  # a lost lease above all: others of the total take their place
            self._left += count
            raise
        self._cut(handed, ends, count, batch)
        return True

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
