"""The data store as a service: a client of a store.

Where it was not told to connect, it starts the store and owns its processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from asyncflow_core.batch import Batch, BatchRef, GroupKey, Key
from asyncflow_core.errors import ConfigError, PeerLostError, ServiceClosedError
from asyncflow_core.services.data_store import (
    LEASE_POLICIES,
    CommitResult,
    DataStore,
    DataStoreCapabilities,
    Lease,
    PutResult,
    Registration,
    StoreStats,
    TaskSpec,
)
from asyncflow_core.wire import KeyPair
from asyncflow_store_zmq.connection import (
    AGAIN_S,
    Connection,
    Kept,
    came_too_late,
    not_awaited,
)
from asyncflow_store_zmq.files import clear_directory
from asyncflow_store_zmq.forks import FORKED, watch
from asyncflow_store_zmq.memory import Call, Steps, StreamSteps
from asyncflow_store_zmq.options import ZmqOptions
from asyncflow_store_zmq.processes import StoreProcesses
from asyncflow_store_zmq.reader import HandoutStream
from asyncflow_store_zmq.session import Session
from asyncflow_store_zmq.streams import AsyncReader, AsyncWriter
from asyncflow_store_zmq.writer import PutStream

__all__ = ["ZmqDataStore", "capabilities"]

_log = logging.getLogger(__name__)
_RECONNECT_S = 60.0


def capabilities(options: ZmqOptions) -> DataStoreCapabilities:
    """What the store can do under these options."""
    return DataStoreCapabilities(
        remote=True,
        durability=frozenset({"none", "journal", "fsync"}),
        capacity_rows=options.capacity_rows,
        capacity_bytes=options.capacity_bytes,
        lease_policies=LEASE_POLICIES | set(options.lease_policies),
    )


class ZmqDataStore(DataStore):
    """One client of the store; with `connect` it uses a store, else it starts and ends one.

    Concurrency: for one event loop; any number of calls at a time.
    """

    def __init__(
        self, options: ZmqOptions | None = None, *, name: str = "", run_dir: Path | None = None
    ) -> None:
        """Keep the arguments.

        Args:
            options: what a user may set.
            name: of this client in the run.
            run_dir: for sockets; default: a directory of its own.
        """
        self._options = options or ZmqOptions()
        self._name = name or f"client-{secrets.token_hex(4)}"
        self._run_dir = run_dir
        self.capabilities = capabilities(self._options)
        self.processes: StoreProcesses | None = None
        self.address = self._options.connect
        self._token = self._options.token or secrets.token_hex(16)
        self._keys: KeyPair | None = None
        self._connection: Connection | None = None
        self._kept: list[Kept] = []
        self._reconnecting, self._adding = asyncio.Lock(), asyncio.Lock()
        self._left: tuple[Any, Any] = (None, None)  # of the process that forked this one
        self._given_up = False  # the last wait for a next life was in vain

    async def open(self) -> None:
        """Start the store, if need be, and connect; what was started ends if that fails."""
        try:
            await self._open()
        except BaseException:
            await self.aclose()
            raise

    async def _open(self) -> None:
        if self._options.keys is not None:
            self._keys = KeyPair.load(self._options.keys)
        if not self._options.connect:
            self.processes = StoreProcesses(self._options, self._token, self._run_dir)
            self.address = (await self.processes.open()).address
        await self._attach()

    async def _attach(self) -> None:
        connection = Connection(self.address, name=self._name, token=self._token, keys=self._keys)
        await connection.open()
        self._connection = connection
        watch(self)

    def forked(self) -> None:
        """Be of no use in a child, and end nothing there; see `forks.py`."""
        self._left = self._connection, self.processes
        self._connection = self.processes = None

    async def aclose(self) -> None:
        """Disconnect; end the store if it was started here."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.aclose()
        if self.processes is not None:
            await self.processes.aclose()
            self.processes = None

    async def add_shard(self) -> None:
        """One more process with memory; for who started the store."""
        if self.processes is None:
            raise ConfigError("a shard is added by who started the store; this is a client of it")
        async with self._adding:  # they are numbered one after another
            address = await self.processes.add_shard()
            await self._opened.call(Call("store.add_shard", [address]))

    def attach_options(self) -> dict[str, Any]:
        """Options with which another process reaches this store."""
        options: dict[str, Any] = {"connect": self.address, "token": self._token}
        if self._reconnect_s:
            options["reconnect_s"] = self._reconnect_s
        if self._options.keys is not None:
            options["keys"] = os.path.abspath(self._options.keys)
        return options

    @property
    def _reconnect_s(self) -> float:
        if self.processes is not None:
            return _RECONNECT_S if self.processes.returns else 0.0
        return self._options.reconnect_s

    async def _run(self, begin: Callable[[Session], StreamSteps], returns: Any = Any) -> Any:
        """Do a session's steps; all of them again where the store died meanwhile and came back.

        That is safe: a put is known by its keys, and leases of an earlier life are lost, for no
        two lives count them alike.
        """
        while True:
            connection = self._opened
            try:
                return await connection.run(begin(connection.session), returns)
            except ServiceClosedError:
                if self._connection in (None, connection):
                    raise
                # Closed under this call, as another one had found the store dead.
            except PeerLostError as error:
                await self._come_back(connection, error)

    async def _come_back(self, old: Connection, lost: PeerLostError) -> None:
        """Wait until a store that died is there again.

        Raises:
            PeerLostError: it is not started again, or not in time.
        """
        wait_s = self._reconnect_s
        if not wait_s:
            raise not_awaited(lost) from lost
        deadline = asyncio.get_running_loop().time() + wait_s
        async with self._reconnecting:
            if self._connection is not old:
                return  # somebody else has seen to it, or it was closed
            _log.warning("%s: %s; waiting for it to be started again", self._name, lost)
            try:
                async with asyncio.timeout_at(deadline):
                    new = await self._attach_again()
            except TimeoutError as error:
                self._given_up = True
                raise came_too_late(lost, wait_s) from error
            self._given_up = False
            await old.aclose()
            if self._connection is old:
                self._connection = new
            else:  # closed meanwhile
                await new.aclose()

    async def _attach_again(self) -> Connection:
        """Connect to the next life, with all registrations, however often that takes."""
        while True:
            connection = Connection(
                self.address, name=self._name, token=self._token, keys=self._keys
            )
            try:
                await connection.open()
                for kept in self._kept:
                    kept.handle = await connection.run(connection.session.register(kept.task))
            except PeerLostError:
                await connection.aclose()
                await asyncio.sleep(AGAIN_S)
            except BaseException:
                await connection.aclose()
                raise
            else:
                return connection

    @property
    def _opened(self) -> Connection:
        if self._connection is None:
            if self._left[0] is not None:
                raise ServiceClosedError(FORKED)
            raise ServiceClosedError(
                "the data store is not open; use it between open() and aclose()"
            )
        return self._connection

    async def register(self, task: TaskSpec) -> Registration:
        """See `DataStore.register`."""
        kept = Kept(task, await self._run(lambda session: session.register(task)))
        self._kept.append(kept)
        return Registration(task, lambda: self._end(kept))

    async def _end(self, kept: Kept) -> None:
        if kept not in self._kept:
            return
        # Until it is answered it is kept: a next life that did not hear of it knows it by another.
        if not self._given_up:
            with contextlib.suppress(PeerLostError, ServiceClosedError):
                await self._run(lambda session: session.end(kept.handle))
        with contextlib.suppress(ValueError):  # ended twice at a time
            self._kept.remove(kept)

    async def put(
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
        """See `DataStore.put`; begun again after a restart, what it finds there it has stored."""
        tries = 0

        def begin(session: Session) -> Steps:
            nonlocal tries
            tries += 1
            return session.put(groups, keys, samples, batch, partition, row_bytes, wait_s)

        result: PutResult = await self._run(begin)
        return result if tries == 1 else PutResult(result.stored + result.known, 0)

    async def lease(
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
        lease: Lease | None = await self._run(
            lambda session: session.lease(
                task, requester, version, limit_rows, limit_tokens, policy, lease_s, wait_s
            )
        )
        return lease

    async def read(self, ref: BatchRef, columns: Sequence[str]) -> Batch:
        """See `DataStore.read`; the arrays are the caller's own."""
        batch: Batch = await self._run(lambda session: session.read(ref, columns))
        return batch

    async def renew(self, leases: Sequence[int], *, lease_s: float) -> tuple[int, ...]:
        """See `DataStore.renew`; a renewal never shortens a lease."""
        lost: tuple[int, ...] = await self._run(lambda session: session.renew(leases, lease_s))
        return lost

    async def commit(
        self, ref: BatchRef, *, writes: Batch | None = None, version: int | None = None
    ) -> CommitResult:
        """See `DataStore.commit`."""
        result: CommitResult = await self._run(lambda session: session.commit(ref, writes, version))
        return result

    async def release(self, ref: BatchRef) -> None:
        """See `DataStore.release`."""
        await self._run(lambda session: session.release(ref))

    async def evict(self, requester: str) -> int:
        """See `SupportsEviction.evict`."""
        count: int = await self._run(lambda session: session.evict(requester))
        return count

    async def drop(self, keys: Sequence[Key], *, reason: str) -> int:
        """See `DataStore.drop`."""
        count: int = await self._run(lambda session: session.drop(keys, reason))
        return count

    async def notify_weights(self, version: int, note: Any = None) -> None:
        """Announce that weights of a version are there; `note` says where, in plain values."""
        await self._run(lambda session: session.notify(version, note))

    async def wait_weights(self, *, after: int, wait_s: float = 60.0) -> tuple[int, Any] | None:
        """The newest announced version above `after`, and its note; None after `wait_s`."""
        found: tuple[int, Any] | None = await self._run(
            lambda session: session.weights(after, wait_s)
        )
        return found

    async def checkpoint(self, version: int) -> None:
        """See `SupportsDurability.checkpoint`."""
        await self._run(lambda session: session.checkpoint(version))

    async def restore(self, version: int) -> int:
        """See `SupportsDurability.restore`."""
        count: int = await self._run(lambda session: session.restore(version))
        return count

    async def clear(self) -> None:
        """See `SupportsDurability.clear`: its processes end, its files go, and it starts anew."""
        if self.processes is None:
            raise ConfigError("a store is cleared by who started it; this is a client of it")
        await self.aclose()
        if self._options.directory is not None:
            await asyncio.to_thread(clear_directory, self._options.directory)
        await self.open()

    async def stats(self, *, drops_after: int = 0, wait_s: float = 0.0) -> StoreStats:
        """See `DataStore.stats`; `bytes` counts segments, with their offsets."""
        stats: StoreStats = await self._run(lambda session: session.stats(drops_after, wait_s))
        return stats

    def writer(self, **how: Any) -> AsyncWriter:
        """Stream puts; takes the arguments of `PutStream`."""
        keeps = bool(self._reconnect_s)
        stream = PutStream(self._opened.session, keeps=keeps, **how)
        return AsyncWriter(stream, lambda begin: self._stream(stream, begin))

    def reader(
        self, task: str, columns: Sequence[str], *, requester: str, **how: Any
    ) -> AsyncReader:
        """Stream micro-batches; takes the arguments of `HandoutStream`."""
        stream = HandoutStream(self._opened.session, task, columns, requester, **how)
        return AsyncReader(stream, lambda begin: self._stream(stream, begin))

    async def _stream(
        self, stream: HandoutStream | PutStream, begin: Callable[[], StreamSteps]
    ) -> Any:
        """Do some steps of a stream, in whatever life the store is."""

        def steps(session: Session) -> StreamSteps:
            if stream.session is not session:
                yield from stream.again(session)
            return (yield from begin())

        return await self._run(steps)
