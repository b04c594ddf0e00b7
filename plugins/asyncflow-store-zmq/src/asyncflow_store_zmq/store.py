"""The data store as a service: a client of a store.

Where it was not told to connect, it starts the store and owns its processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncflow_core.batch import Batch, BatchRef, GroupKey, Key
from asyncflow_core.errors import AsyncFlowError, ConfigError, PeerLostError, ServiceClosedError
from asyncflow_core.services.data_store import (
    CommitResult,
    DataStore,
    DataStoreCapabilities,
    Lease,
    PutResult,
    Registration,
    StoreStats,
    TaskSpec,
)
from asyncflow_core.wire import Client, KeyPair
from asyncflow_store_zmq.files import clear_directory
from asyncflow_store_zmq.memory import Call, Steps
from asyncflow_store_zmq.options import ZmqOptions
from asyncflow_store_zmq.processes import StoreProcesses
from asyncflow_store_zmq.session import Session

__all__ = ["ZmqDataStore", "capabilities"]

_TIMEOUT_S = 60.0


def capabilities(options: ZmqOptions) -> DataStoreCapabilities:
    """What the store can do under these options."""
    return DataStoreCapabilities(
        remote=True,
        durability=frozenset({"none", "journal", "fsync"}),
        capacity_rows=options.capacity_rows,
        capacity_bytes=options.capacity_bytes,
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
        self._clients: list[Client] = []  # the controller's last
        self._session: Session | None = None
        self._waiting: set[asyncio.Task[Any]] = set()

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
        session = Session(self.address)
        self._clients.append(await self._connect(self.address))
        self._session = session
        await self._run(session.hello())
        if not session.local:
            await self._connect_shards()

    async def _connect_shards(self) -> None:
        """Those not yet connected; the controller stays last."""
        for address in self._opened.shard_addresses[len(self._clients) - 1 :]:
            self._clients.insert(-1, await self._connect(address))

    async def _connect(self, address: str) -> Client:
        client = Client(
            address, name=self._name, token=self._token, timeout_s=_TIMEOUT_S, keys=self._keys
        )
        await client.open()
        return client

    async def aclose(self) -> None:
        """Disconnect; end the store if it was started here."""
        session, self._session = self._session, None
        for client in self._clients:
            await client.aclose()
        self._clients.clear()
        if session is not None:
            session.close()
        if self.processes is not None:
            await self.processes.aclose()
            self.processes = None

    async def add_shard(self) -> None:
        """One more process with memory; for who started the store."""
        if self.processes is None:
            raise ConfigError("a shard is added by who started the store; this is a client of it")
        address = await self.processes.add_shard()
        await self._call(Call("store.add_shard", [address]), Any)

    def attach_options(self) -> dict[str, Any]:
        """Options with which another process reaches this store."""
        keys = self._options.keys
        pair = {} if keys is None else {"keys": os.path.abspath(keys)}
        return {"connect": self.address, "token": self._token, **pair}

    async def _run(self, steps: Steps, returns: Any = Any) -> Any:
        """Make the calls a session asks for."""
        try:
            call = next(steps)
            while True:
                try:
                    result = await self._call(call, returns)
                except (AsyncFlowError, asyncio.CancelledError) as error:
                    call = steps.throw(error)
                else:
                    call = steps.send(result)
        except StopIteration as stop:
            return stop.value

    async def _call(self, call: Call, returns: Any) -> Any:
        timeout_s = None if call.wait_s is None else call.wait_s + _TIMEOUT_S
        if call.shard >= len(self._clients) - 1:  # added meanwhile
            await self._run(self._opened.find_shards())
            await self._connect_shards()
        return await self._clients[call.shard].call(
            call.method, {"m": call.arguments}, returns=returns, timeout_s=timeout_s
        )

    @property
    def _opened(self) -> Session:
        if self._session is None:
            raise ServiceClosedError(
                "the data store is not open; use it between open() and aclose()"
            )
        return self._session

    async def register(self, task: TaskSpec) -> Registration:
        """See `DataStore.register`."""
        handle = await self._run(self._opened.register(task))
        return Registration(task, lambda: self._end(handle))

    async def _end(self, handle: str) -> None:
        if self._session is not None:
            with contextlib.suppress(PeerLostError, ServiceClosedError):
                await self._call(Call("store.end", [handle]), Any)

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
        """See `DataStore.put`."""
        steps = self._opened.put(groups, keys, samples, batch, partition, row_bytes, wait_s)
        result: PutResult = await self._run(steps)
        return result

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
        steps = self._opened.lease(
            task, requester, version, limit_rows, limit_tokens, policy, lease_s, wait_s
        )
        lease: Lease | None = await self._run(steps)
        return lease

    async def read(self, ref: BatchRef, columns: Sequence[str]) -> Batch:
        """See `DataStore.read`; the arrays are the caller's own."""
        batch: Batch = await self._run(self._opened.read(ref, columns))
        return batch

    async def renew(self, leases: Sequence[int], *, lease_s: float) -> tuple[int, ...]:
        """See `DataStore.renew`; a renewal never shortens a lease."""
        lost: tuple[int, ...] = await self._run(self._opened.renew(leases, lease_s))
        return lost

    async def commit(
        self, ref: BatchRef, *, writes: Batch | None = None, version: int | None = None
    ) -> CommitResult:
        """See `DataStore.commit`."""
        result: CommitResult = await self._run(self._opened.commit(ref, writes, version))
        return result

    async def release(self, ref: BatchRef) -> None:
        """See `DataStore.release`."""
        await self._run(self._opened.release(ref))

    async def evict(self, requester: str) -> int:
        """See `SupportsEviction.evict`."""
        count: int = await self._run(self._opened.evict(requester))
        return count

    async def drop(self, keys: Sequence[Key], *, reason: str) -> int:
        """See `DataStore.drop`."""
        count: int = await self._run(self._opened.drop(keys, reason))
        return count

    async def notify_weights(self, version: int, note: Any = None) -> None:
        """Announce that weights of a version are there; `note` says where, in plain values."""
        await self._run(self._opened.notify(version, note))

    async def wait_weights(self, *, after: int, wait_s: float = 60.0) -> tuple[int, Any] | None:
        """The newest announced version above `after`, and its note; None after `wait_s`."""
        found: tuple[int, Any] | None = await self._run(self._opened.weights(after, wait_s))
        return found

    async def checkpoint(self, version: int) -> None:
        """See `SupportsDurability.checkpoint`."""
        await self._run(self._opened.checkpoint(version))

    async def restore(self, version: int) -> int:
        """See `SupportsDurability.restore`."""
        count: int = await self._run(self._opened.restore(version))
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
        stats: StoreStats = await self._run(
            self._opened.stats(drops_after, wait_s), returns=StoreStats
        )
        return stats
