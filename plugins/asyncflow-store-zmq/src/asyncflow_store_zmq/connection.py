"""A client's connections to one life of a store, and the session that goes with them.

A store that is started again knows nothing of an earlier session: its memory, its leases, its
numbers of layouts. So both end together, and what a client keeps over all lives is here too.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from asyncflow_core.errors import AsyncFlowError, PeerLostError, ServiceTimeoutError
from asyncflow_core.services.data_store import TaskSpec
from asyncflow_core.wire import BlockingClient, Client, KeyPair
from asyncflow_store_zmq.lane import lane_of
from asyncflow_store_zmq.lane_client import LaneClient
from asyncflow_store_zmq.memory import Await, Begin, Call, NoAnswerError, StreamSteps
from asyncflow_store_zmq.session import Session

__all__ = [
    "AGAIN_S",
    "BlockingConnection",
    "Connection",
    "Kept",
    "came_too_late",
    "not_awaited",
]

AGAIN_S = 0.1
"""Between two tries to reach a store that is started again."""
_TIMEOUT_S = 60.0
_SHARD_S = 30.0
_TRY_S = 1.0
_FOREVER_S = 1e9


@dataclass(slots=True, eq=False)
class Kept:
    """A registration, over all lives of the store: its handle in the first and in this one."""

    task: TaskSpec
    handle: str
    first: str = ""

    def __post_init__(self) -> None:
        """Remember the first."""
        self.first = self.handle


def not_awaited(lost: PeerLostError) -> PeerLostError:
    """The store is not started again."""
    return PeerLostError(
        f"{lost}; nobody waits for it to come back, and what a store without durability "
        "held is gone with it",
        service=lost.service,
    )


def came_too_late(lost: PeerLostError, wait_s: float) -> PeerLostError:
    """It was not, in time."""
    return PeerLostError(f"{lost}; it did not come back within {wait_s:g} s", service=lost.service)


class Connection:
    """Makes the calls that a session asks for, on an event loop."""

    def __init__(self, address: str, *, name: str, token: str, keys: KeyPair | None) -> None:
        """Keep the arguments; `open` connects."""
        self.session = Session(address)
        self._address = address
        self._name = name
        self._token = token
        self._keys = keys
        self._clients: list[Client] = []  # the controller's last
        self._closed = False

    async def open(self) -> None:
        """Connect; closed again if that fails.

        Raises:
            AsyncFlowError: as `Client.open`.
        """
        try:
            self._clients.append(await self._connect(self._address))
            await self.run(self.session.hello())
            if not self.session.local:
                await self._connect_shards()
        except BaseException:
            await self.aclose()
            raise

    async def _connect_shards(self) -> None:
        """Those not yet connected; the controller stays last."""
        for address in self.session.shard_addresses[len(self._clients) - 1 :]:
            self._clients.insert(-1, await self._connect(address))

    async def _connect(self, address: str, connect_s: float = 30.0) -> Client:
        client = Client(
            address,
            name=self._name,
            token=self._token,
            timeout_s=_TIMEOUT_S,
            connect_s=connect_s,
            keys=self._keys,
        )
        await client.open()
        return client

    async def _find_again(self, shard: int, lost: Client) -> None:
        """Connect to a shard that died, as soon as it is started again.

        Raises:
            PeerLostError: it is not, for half a minute, or the controller is gone, too.
        """
        deadline = asyncio.get_running_loop().time() + _SHARD_S
        while self._clients[shard] is lost:  # else another call has found it
            await self.run(self.session.find_shards())
            try:
                client = await self._connect(self.session.shard_addresses[shard], _TRY_S)
            except PeerLostError:
                if asyncio.get_running_loop().time() >= deadline:
                    raise
                await asyncio.sleep(AGAIN_S)
                continue
            if self._closed or self._clients[shard] is not lost:
                await client.aclose()
                return
            self._clients[shard] = client
            await lost.aclose()

    async def run(self, steps: StreamSteps, returns: Any = Any) -> Any:
        """Make the calls that steps ask for; their result."""
        try:
            step = next(steps)
            while True:
                try:
                    result = await self._do(step, returns)
                except (AsyncFlowError, asyncio.CancelledError) as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(result)
        except StopIteration as stop:
            return stop.value

    async def _do(self, step: Call | Begin | Await, returns: Any) -> Any:
        if isinstance(step, Call):
            return await self.call(step, returns)
        if isinstance(step, Begin):
            begun = asyncio.create_task(self.call(step.call._replace(wait_s=None)))
            begun.add_done_callback(_see)
            step.note(begun)
            return await asyncio.sleep(0)  # until it is on its way
        wait_s = step.call.wait_s
        timeout_s = None if wait_s is None else wait_s + _TIMEOUT_S
        await asyncio.wait((step.handle,), timeout=timeout_s)  # which leaves it under way
        if not step.handle.done():
            raise NoAnswerError(f"no answer from the store within {timeout_s} s", service="store")
        return step.handle.result()

    async def call(self, call: Call, returns: Any = Any) -> Any:
        """Make one."""
        timeout_s = None if call.wait_s is None else call.wait_s + _TIMEOUT_S
        if call.shard >= len(self._clients) - 1 and call.shard >= 0:  # added meanwhile
            await self.run(self.session.find_shards())
            await self._connect_shards()
        client = self._clients[call.shard]
        arguments = {"m": call.arguments}
        try:
            return await client.call(call.method, arguments, returns=returns, timeout_s=timeout_s)
        except PeerLostError:
            if call.shard < 0:
                raise
        # Started again, since its memory outlives it; and what shards do may be done twice.
        await self._find_again(call.shard, client)
        client = self._clients[call.shard]
        return await client.call(call.method, arguments, returns=returns, timeout_s=timeout_s)

    async def aclose(self) -> None:
        """Disconnect. Calls under way end with `ServiceClosedError`."""
        self._closed = True
        for client in self._clients:
            await client.aclose()
        self.session.close()


def _see(begun: asyncio.Task[Any]) -> None:
    """Its error is its stream's, which may have gone into the next life of the store."""
    if not begun.cancelled():
        begun.exception()


class BlockingConnection:
    """Makes them without an event loop, on the controller's lane where there is one."""

    def __init__(self, address: str, *, name: str, token: str, keys: KeyPair | None) -> None:
        """Keep the arguments; `open` connects."""
        self.session = Session(address)
        self._address = address
        self._name = name
        self._token = token
        self._keys = keys
        self._clients: list[BlockingClient | LaneClient] = []  # the controller's last

    def open(self) -> None:
        """Connect; closed again if that fails.

        Raises:
            AsyncFlowError: as `Client.open`.
        """
        try:
            self._clients.append(self._connect(self._address))
            self.run(self.session.hello())
            if not self.session.local:
                self._connect_shards()
        except BaseException:
            self.close()
            raise

    def _connect_shards(self) -> None:
        for address in self.session.shard_addresses[len(self._clients) - 1 :]:
            self._clients.insert(-1, self._connect(address))

    def _connect(self, address: str, connect_s: float = 30.0) -> BlockingClient | LaneClient:
        lane = lane_of(address)
        client: BlockingClient | LaneClient
        if lane is not None and lane.exists():
            client = LaneClient(lane, name=self._name, token=self._token)
        else:
            client = BlockingClient(
                address,
                name=self._name,
                token=self._token,
                timeout_s=_TIMEOUT_S,
                connect_s=connect_s,
                keys=self._keys,
            )
        client.open()
        return client

    def _find_again(self, shard: int) -> None:
        """Connect to a shard that died, as soon as it is started again; raises as `Connection`."""
        deadline = time.monotonic() + _SHARD_S
        while True:
            self.run(self.session.find_shards())
            try:
                client = self._connect(self.session.shard_addresses[shard], _TRY_S)
            except PeerLostError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(AGAIN_S)
            else:
                self._clients[shard].close()
                self._clients[shard] = client
                return

    def run(self, steps: StreamSteps) -> Any:
        """Make the calls that steps ask for; their result."""
        try:
            step = next(steps)
            while True:
                try:
                    result = self._do(step)
                except AsyncFlowError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(result)
        except StopIteration as stop:
            return stop.value

    def _do(self, step: Call | Begin | Await) -> Any:
        if isinstance(step, Call):
            try:
                return self._call(step)
            except PeerLostError:
                if step.shard < 0:
                    raise
            # Started again, since its memory outlives it; and what shards do may be done twice.
            self._find_again(step.shard)
            return self._call(step)
        if isinstance(step, Begin):
            return step.note(self.send(step.call, _FOREVER_S))
        return self.wait(step.handle, step.call)

    def _call(self, step: Call) -> Any:
        number = self.send(step, _deadline_s(step))
        try:
            return self.wait(number, step)
        except BaseException:
            self._clients[step.shard].forget(number)
            raise

    def send(self, call: Call, timeout_s: float) -> int:
        """Begin one."""
        if call.shard >= len(self._clients) - 1:  # added meanwhile
            self.run(self.session.find_shards())
            self._connect_shards()
        client = self._clients[call.shard]
        return client.send(call.method, {"m": call.arguments}, timeout_s=timeout_s)

    def wait(self, number: int, call: Call) -> Any:
        """Its result; `NoAnswerError` where it may be waited for again."""
        client = self._clients[call.shard]
        try:
            return client.wait(number, timeout_s=_deadline_s(call) + 1.0)
        except ServiceTimeoutError as error:
            if client.under_way(number):
                raise NoAnswerError(str(error), service=error.service) from error
            raise

    def forked(self) -> None:
        """Let go of what keeps the lane open beyond the life of the process that opened it."""
        for client in self._clients:
            if isinstance(client, LaneClient):
                client.close()

    def close(self) -> None:
        """Disconnect. Idempotent."""
        for client in self._clients:
            client.close()
        self._clients.clear()
        self.session.close()


def _deadline_s(call: Call) -> float:
    return _FOREVER_S if call.wait_s is None else call.wait_s + _TIMEOUT_S
