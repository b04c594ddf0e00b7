"""The store without an event loop: for training loops and pipelines that have none."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from asyncflow_core.batch import Batch, BatchRef, GroupKey, Key
from asyncflow_core.errors import AsyncFlowError, ServiceClosedError
from asyncflow_core.services.data_store import (
    CommitResult,
    Lease,
    PutResult,
    StoreStats,
    TaskSpec,
)
from asyncflow_core.wire import BlockingClient, KeyPair
from asyncflow_store_zmq.lane import lane_of
from asyncflow_store_zmq.lane_client import LaneClient
from asyncflow_store_zmq.memory import Call, Steps
from asyncflow_store_zmq.reader import Reader
from asyncflow_store_zmq.session import Session
from asyncflow_store_zmq.writer import Writer

__all__ = ["BlockingStore"]

_TIMEOUT_S = 60.0
_FOREVER_S = 1e9


class BlockingStore:
    """The methods of `DataStore`, blocking; and `reader`, which prefetches.

    Concurrency: for one thread at a time.
    """

    def __init__(
        self, address: str, *, token: str, name: str = "", keys: KeyPair | None = None
    ) -> None:
        """Where a store answers, its secret, and keys if the address has one; `open` connects."""
        self._address = address
        self._token = token
        self._keys = keys
        self._name = name or f"client-{secrets.token_hex(4)}"
        self._clients: list[BlockingClient | LaneClient] = []
        self._session: Session | None = None

    def open(self) -> None:
        """Connect."""
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        session = Session(self._address)
        self._clients.append(self._connect(self._address))
        self._session = session
        self._run(session.hello())
        if not session.local:
            self._connect_shards()

    def _connect_shards(self) -> None:
        """Those not yet connected; the controller stays last."""
        for address in self._opened.shard_addresses[len(self._clients) - 1 :]:
            self._clients.insert(-1, self._connect(address))

    def _connect(self, address: str) -> BlockingClient | LaneClient:
        lane = lane_of(address)
        client: BlockingClient | LaneClient
        if lane is not None and lane.exists():
            client = LaneClient(lane, name=self._name, token=self._token)
        else:
            client = BlockingClient(
                address, name=self._name, token=self._token, timeout_s=_TIMEOUT_S, keys=self._keys
            )
        client.open()
        return client

    def close(self) -> None:
        """Disconnect. Idempotent."""
        session, self._session = self._session, None
        for client in self._clients:
            client.close()
        self._clients.clear()
        if session is not None:
            session.close()

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

    def _run(self, steps: Steps) -> Any:
        """Make the calls a session asks for."""
        try:
            call = next(steps)
            while True:
                try:
                    result = self._wait(self._send(call), call)
                except AsyncFlowError as error:
                    call = steps.throw(error)
                else:
                    call = steps.send(result)
        except StopIteration as stop:
            return stop.value

    def _send(self, call: Call) -> int:
        if call.shard >= len(self._clients) - 1:  # added meanwhile
            self._run(self._opened.find_shards())
            self._connect_shards()
        client = self._clients[call.shard]
        return client.send(call.method, {"m": call.arguments}, timeout_s=_deadline_s(call))

    def _wait(self, number: int, call: Call) -> Any:
        client = self._clients[call.shard]
        return client.wait(number, timeout_s=_deadline_s(call) + 1.0)

    @property
    def _opened(self) -> Session:
        if self._session is None:
            raise ServiceClosedError(
                "the data store is not open; use it between open() and close()"
            )
        return self._session

    def register(self, task: TaskSpec) -> str:
        """Announce a task; the result is for `end`."""
        handle: str = self._run(self._opened.register(task))
        return handle

    def end(self, handle: str) -> None:
        """End a registration."""
        self._wait(self._send(call := Call("store.end", [handle])), call)

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
        result: PutResult = self._run(
            self._opened.put(groups, keys, samples, batch, partition, row_bytes, wait_s)
        )
        return result

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
            self._opened.lease(
                task, requester, version, limit_rows, limit_tokens, policy, lease_s, wait_s
            )
        )
        return lease

    def read(self, ref: BatchRef, columns: Sequence[str]) -> Batch:
        """See `DataStore.read`."""
        batch: Batch = self._run(self._opened.read(ref, columns))
        return batch

    def renew(self, leases: Sequence[int], *, lease_s: float) -> tuple[int, ...]:
        """See `DataStore.renew`."""
        lost: tuple[int, ...] = self._run(self._opened.renew(leases, lease_s))
        return lost

    def commit(
        self, ref: BatchRef, *, writes: Batch | None = None, version: int | None = None
    ) -> CommitResult:
        """See `DataStore.commit`."""
        result: CommitResult = self._run(self._opened.commit(ref, writes, version))
        return result

    def release(self, ref: BatchRef) -> None:
        """See `DataStore.release`."""
        self._run(self._opened.release(ref))

    def drop(self, keys: Sequence[Key], *, reason: str) -> int:
        """See `DataStore.drop`."""
        count: int = self._run(self._opened.drop(keys, reason))
        return count

    def notify_weights(self, version: int, note: Any = None) -> None:
        """Announce that weights of a version are there; `note` says where, in plain values."""
        self._run(self._opened.notify(version, note))

    def wait_weights(self, *, after: int, wait_s: float = 60.0) -> tuple[int, Any] | None:
        """The newest announced version above `after`, and its note; None after `wait_s`."""
        found: tuple[int, Any] | None = self._run(self._opened.weights(after, wait_s))
        return found

    def checkpoint(self, version: int) -> None:
        """See `SupportsDurability.checkpoint`."""
        self._run(self._opened.checkpoint(version))

    def restore(self, version: int) -> int:
        """See `SupportsDurability.restore`."""
        count: int = self._run(self._opened.restore(version))
        return count

    def stats(self, *, drops_after: int = 0, wait_s: float = 0.0) -> StoreStats:
        """See `DataStore.stats`."""
        stats: StoreStats = self._run(self._opened.stats(drops_after, wait_s))
        return stats

    def writer(self, **how: Any) -> Writer:
        """Stream puts; see `Writer`."""
        return Writer(self._opened, self._send, self._wait, **how)

    def reader(self, task: str, columns: Sequence[str], *, requester: str, **how: Any) -> Reader:
        """Stream micro-batches; see `Reader`."""
        return Reader(
            self._opened, self._run, self._send, self._wait, task, columns, requester, **how
        )


def _deadline_s(call: Call) -> float:
    return _FOREVER_S if call.wait_s is None else call.wait_s + _TIMEOUT_S
