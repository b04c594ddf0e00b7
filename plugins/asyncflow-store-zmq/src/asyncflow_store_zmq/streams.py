"""Readers and writers as their users hold them, with and without an event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any

from asyncflow_core.batch import Batch, GroupKey
from asyncflow_core.services.data_store import PutResult
from asyncflow_store_zmq.memory import StreamSteps
from asyncflow_store_zmq.reader import HandoutStream, MicroBatch
from asyncflow_store_zmq.writer import PutStream

__all__ = ["AsyncReader", "AsyncWriter", "Reader", "Writer"]

Run = Callable[[Callable[[], StreamSteps]], Any]
"""Makes the steps of a stream, over the lives of a store; gives what they return."""
AsyncRun = Callable[[Callable[[], StreamSteps]], Awaitable[Any]]


class Reader:
    """Yields `MicroBatch`es until `total_rows` were handed out, exactly.

    A task of whole groups gets them whole here too: no micro-batch ends inside one, and the stream
    ends before a group that would go beyond the total.

    Without a total, until it is closed or nothing was ready for `wait_s`.

    `commit` says that a micro-batch is done. The store learns it with the next message; what it
    refuses then (a lost lease) is raised by a later step, at the latest by `close`.

    Concurrency: as its client's.
    """

    def __init__(self, stream: HandoutStream, run: Run) -> None:
        """Build it with the client's `reader`; its arguments are those of `HandoutStream`."""
        self._stream, self._run = stream, run

    def __iter__(self) -> Iterator[MicroBatch]:
        """Itself."""
        return self

    def __next__(self) -> MicroBatch:
        """The next micro-batch, in the order of hand-out; raises as `HandoutStream.take`."""
        item: MicroBatch | None = self._run(self._stream.take)
        if item is None:
            raise StopIteration
        return item

    def commit(
        self, item: MicroBatch, writes: Batch | None = None, version: int | None = None
    ) -> None:
        """A micro-batch is done; with the columns its task writes."""
        self._run(lambda: self._stream.commit(item, writes, version))

    def flush(self) -> None:
        """Tell the store what is done, and wait until it knows."""
        self._run(self._stream.flush)

    def close(self) -> None:
        """Flush, and give back what was handed out ahead."""
        self._run(self._stream.close)


class AsyncReader:
    """As `Reader`, on an event loop. Concurrency: for one task at a time."""

    def __init__(self, stream: HandoutStream, run: AsyncRun) -> None:
        """Build it with the client's `reader`; its arguments are those of `HandoutStream`."""
        self._stream, self._run = stream, run

    def __aiter__(self) -> AsyncIterator[MicroBatch]:
        """Itself."""
        return self

    async def __anext__(self) -> MicroBatch:
        """The next micro-batch, in the order of hand-out; raises as `HandoutStream.take`."""
        item: MicroBatch | None = await self._run(self._stream.take)
        if item is None:
            raise StopAsyncIteration
        return item

    async def commit(
        self, item: MicroBatch, writes: Batch | None = None, version: int | None = None
    ) -> None:
        """A micro-batch is done; with the columns its task writes."""
        await self._run(lambda: self._stream.commit(item, writes, version))

    async def flush(self) -> None:
        """Tell the store what is done, and wait until it knows."""
        await self._run(self._stream.flush)

    async def aclose(self) -> None:
        """Flush, and give back what was handed out ahead."""
        await self._run(self._stream.close)


class Writer:
    """Puts without waiting for each answer; at most `in_flight` are without one.

    What the store refuses is raised by a later `put`, at the latest by `flush`. A group is stored
    for sure once `flush` has returned. A full store stops the writer: that is its backpressure.

    Concurrency: as its client's.
    """

    def __init__(self, stream: PutStream, run: Run) -> None:
        """Build it with the client's `writer`; its arguments are those of `put`."""
        self._stream, self._run = stream, run

    def put(self, groups: Batch, *, keys: Sequence[GroupKey], batch: int | None = None) -> None:
        """Begin to store prompt groups; their columns are copied before this returns."""
        self._stream.note(groups, keys, batch)
        self._run(self._stream.push)

    def flush(self) -> PutResult:
        """Wait for every answer; what all puts since the last flush did."""
        result: PutResult = self._run(self._stream.flush)
        return result


class AsyncWriter:
    """As `Writer`, on an event loop. Concurrency: for one task at a time."""

    def __init__(self, stream: PutStream, run: AsyncRun) -> None:
        """Build it with the client's `writer`; its arguments are those of `put`."""
        self._stream, self._run = stream, run

    async def put(
        self, groups: Batch, *, keys: Sequence[GroupKey], batch: int | None = None
    ) -> None:
        """Begin to store prompt groups; their columns are copied before this returns."""
        self._stream.note(groups, keys, batch)
        await self._run(self._stream.push)

    async def flush(self) -> PutResult:
        """Wait for every answer; what all puts since the last flush did."""
        result: PutResult = await self._run(self._stream.flush)
        return result
