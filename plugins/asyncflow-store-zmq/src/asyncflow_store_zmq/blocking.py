"""The store without an event loop: for training loops and pipelines that have none."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from asyncflow_core.batch import Batch, BatchRef, GroupKey, Key
from asyncflow_core.errors import PeerLostError, ServiceClosedError
from asyncflow_core.services.data_store import (
    CommitResult,
    Lease,
    PutResult,
    StoreStats,
    TaskSpec,
)
from asyncflow_core.wire import KeyPair
from asyncflow_store_zmq.connection import (
    AGAIN_S,
    BlockingConnection,
    Kept,
    came_too_late,
    not_awaited,
)
from asyncflow_store_zmq.forks import FORKED, watch
from asyncflow_store_zmq.memory import Steps, StreamSteps
from asyncflow_store_zmq.reader import HandoutStream
from asyncflow_store_zmq.session import Session
from asyncflow_store_zmq.streams import Reader, Writer
from asyncflow_store_zmq.writer import PutStream

__all__ = ["BlockingStore"]

_log = logging.getLogger(__name__)


class BlockingStore:
    """The methods of `DataStore`, blocking; and `reader`, which prefetches.

    Concurrency: for one thread at a time.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str,
        name: str = "",
        keys: KeyPair | None = None,
        reconnect_s: float = 0.0,
    ) -> None:
        """Where a store answers; `open` connects.

        Args:
            address: of the controller.
            token: the store's secret.
            name: of this client in the run.
            keys: if the address has a key.
            reconnect_s: how long to wait for a store that died and is started again; 0 does not.
        """
        self._address = address
        self._token = token
        self._keys = keys
        self._name = name or f"client-{secrets.token_hex(4)}"
        self._reconnect_s = reconnect_s
        self._connection: BlockingConnection | None = None
        self._kept: list[Kept] = []
        self._left: BlockingConnection | None = None  # to the process that forked this one

    def open(self) -> None:
        """Connect."""
        connection = self._new_connection()
        connection.open()
        self._connection = connection
        watch(self)

    def forked(self) -> None:
        """Be of no use in a child; see `forks.py`."""
        if self._connection is not None:
            self._connection.forked()
        self._left, self._connection = self._connection, None

    def _new_connection(self) -> BlockingConnection:
        return BlockingConnection(
            self._address, name=self._name, token=self._token, keys=self._keys
        )

    def close(self) -> None:
        """Disconnect. Idempotent."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def __enter__(self) -> Self:
        """Open."""
        self.open()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    def _run(self, begin: Callable[[Session], Steps]) -> Any:
        """Do a session's steps; all of them again where the store died meanwhile and came back.

        That is safe: a put is known by its keys, and leases of an earlier life are lost, for no
        two lives count them alike.
        """
        while True:
            connection = self._opened
            try:
                return connection.run(begin(connection.session))
            except PeerLostError as error:
                self._come_back(connection, error)

    def _come_back(self, old: BlockingConnection, lost: PeerLostError) -> None:
        """Wait until a store that died is there again, with all registrations.

        Raises:
            PeerLostError: it is not started again, or not in time.
        """
        if not self._reconnect_s:
            raise not_awaited(lost) from lost
        _log.warning("%s: %s; waiting for it to be started again", self._name, lost)
        deadline = time.monotonic() + self._reconnect_s
        while True:
            connection = self._new_connection()
            try:
                connection.open()
                for kept in self._kept:
                    kept.handle = connection.run(connection.session.register(kept.task))
            except PeerLostError as error:
                connection.close()
                if time.monotonic() >= deadline:
                    raise came_too_late(lost, self._reconnect_s) from error
                time.sleep(AGAIN_S)
            except BaseException:
                connection.close()
                raise
            else:
                old.close()
                self._connection = connection
                return

    @property
    def _opened(self) -> BlockingConnection:
        if self._connection is None:
            if self._left is not None:
                raise ServiceClosedError(FORKED)
            raise ServiceClosedError(
                "the data store is not open; use it between open() and close()"
            )
        return self._connection

    def register(self, task: TaskSpec) -> str:
        """Announce a task; the result is for `end`."""
        kept = Kept(task, self._run(lambda session: session.register(task)))
        self._kept.append(kept)
        return kept.handle

    def end(self, handle: str) -> None:
        """End a registration, by what `register` gave."""
        kept = next((kept for kept in self._kept if handle in (kept.handle, kept.first)), None)
        if kept is None:
            self._run(lambda session: session.end(handle))
            return
        # Until it is answered it is kept: a next life that did not hear of it knows it by another.
        self._run(lambda session: session.end(kept.handle))
        self._kept.remove(kept)

    def put(
        self,
        groups: Batch,
        *,
        keys: Sequence[GroupKey],
        samples: int = 1,
        batch: int | None = None,
        partition: str = "train",
        row_bytes: int = 0,
        wait_s: float | None = None,
    ) -> PutResult:
        """See `DataStore.put`."""
        tries = 0

        def begin(session: Session) -> Steps:
            nonlocal tries
            tries += 1
            return session.put(groups, keys, samples, batch, partition, row_bytes, wait_s)

        result: PutResult = self._run(begin)
        return result if tries == 1 else PutResult(result.stored + result.known, 0)

    def lease(
        self,
        task: str,
        *,
        requester: str,
        version: int | None = None,
        limit_rows: int | None = None,
        limit_tokens: int | None = None,
        policy: str = "fifo",
        lease_s: float = 60.0,
        wait_s: float = 0.0,
    ) -> Lease | None:
        """See `DataStore.lease`."""
        lease: Lease | None = self._run(
            lambda session: session.lease(
                task, requester, version, limit_rows, limit_tokens, policy, lease_s, wait_s
            )
        )
        return lease

    def read(self, ref: BatchRef, columns: Sequence[str]) -> Batch:
        """See `DataStore.read`."""
        batch: Batch = self._run(lambda session: session.read(ref, columns))
        return batch

    def renew(self, leases: Sequence[int], *, lease_s: float) -> tuple[int, ...]:
        """See `DataStore.renew`."""
        lost: tuple[int, ...] = self._run(lambda session: session.renew(leases, lease_s))
        return lost

    def commit(
        self, ref: BatchRef, *, writes: Batch | None = None, version: int | None = None
    ) -> CommitResult:
        """See `DataStore.commit`."""
        result: CommitResult = self._run(lambda session: session.commit(ref, writes, version))
        return result

    def release(self, ref: BatchRef) -> None:
        """See `DataStore.release`."""
        self._run(lambda session: session.release(ref))

    def evict(self, requester: str) -> int:
        """See `SupportsEviction.evict`."""
        count: int = self._run(lambda session: session.evict(requester))
        return count

    def drop(self, keys: Sequence[Key], *, reason: str) -> int:
        """See `DataStore.drop`."""
        count: int = self._run(lambda session: session.drop(keys, reason))
        return count

    def notify_weights(self, version: int, note: Any = None) -> None:
        """Announce that weights of a version are there; `note` says where, in plain values."""
        self._run(lambda session: session.notify(version, note))

    def wait_weights(self, *, after: int, wait_s: float = 60.0) -> tuple[int, Any] | None:
        """The newest announced version above `after`, and its note; None after `wait_s`."""
        found: tuple[int, Any] | None = self._run(lambda session: session.weights(after, wait_s))
        return found

    def checkpoint(self, version: int) -> None:
        """See `SupportsDurability.checkpoint`."""
        self._run(lambda session: session.checkpoint(version))

    def restore(self, version: int) -> int:
        """See `SupportsDurability.restore`."""
        count: int = self._run(lambda session: session.restore(version))
        return count

    def stats(self, *, drops_after: int = 0, wait_s: float = 0.0) -> StoreStats:
        """See `DataStore.stats`."""
        stats: StoreStats = self._run(lambda session: session.stats(drops_after, wait_s))
        return stats

    def writer(self, **how: Any) -> Writer:
        """Stream puts; takes the arguments of `PutStream`."""
        stream = PutStream(self._opened.session, keeps=bool(self._reconnect_s), **how)
        return Writer(stream, lambda begin: self._stream(stream, begin))

    def reader(self, task: str, columns: Sequence[str], *, requester: str, **how: Any) -> Reader:
        """Stream micro-batches; takes the arguments of `HandoutStream`."""
        stream = HandoutStream(self._opened.session, task, columns, requester, **how)
        return Reader(stream, lambda begin: self._stream(stream, begin))

    def _stream(self, stream: HandoutStream | PutStream, begin: Callable[[], StreamSteps]) -> Any:
        """Do some steps of a stream, in whatever life the store is."""
        while True:
            connection = self._opened
            try:
                if stream.session is not connection.session:
                    connection.run(stream.again(connection.session))
                return connection.run(begin())
            except PeerLostError as error:
                self._come_back(connection, error)
