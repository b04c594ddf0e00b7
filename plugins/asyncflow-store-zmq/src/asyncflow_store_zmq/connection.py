"""A client's connections to one life of a store, and the session that goes with them."""

from __future__ import annotations

import asyncio
from typing import Any

from asyncflow_core.errors import AsyncFlowError
from asyncflow_core.wire import Client, KeyPair
from asyncflow_store_zmq.memory import Call, Steps
from asyncflow_store_zmq.session import Session

__all__ = ["Connection"]

_TIMEOUT_S = 60.0


class Connection:
    """Makes the calls that a session asks for.

    A store that is started again knows nothing of an earlier session: its memory, its leases, its
    numbers of layouts. So both end together.
    """

    def __init__(self, address: str, *, name: str, token: str, keys: KeyPair | None) -> None:
        """Keep the arguments; `open` connects."""
        self.session = Session(address)
        self._address = address
        self._name = name
        self._token = token
        self._keys = keys
        self._clients: list[Client] = []  # the controller's last

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

    async def _connect(self, address: str) -> Client:
        client = Client(
            address, name=self._name, token=self._token, timeout_s=_TIMEOUT_S, keys=self._keys
        )
        await client.open()
        return client

    async def run(self, steps: Steps, returns: Any = Any) -> Any:
        """Make the calls that steps ask for; their result."""
        try:
            call = next(steps)
            while True:
                try:
                    result = await self.call(call, returns)
                except (AsyncFlowError, asyncio.CancelledError) as error:
                    call = steps.throw(error)
                else:
                    call = steps.send(result)
        except StopIteration as stop:
            return stop.value

    async def call(self, call: Call, returns: Any = Any) -> Any:
        """Make one."""
        timeout_s = None if call.wait_s is None else call.wait_s + _TIMEOUT_S
        if call.shard >= len(self._clients) - 1 and call.shard >= 0:  # added meanwhile
            await self.run(self.session.find_shards())
            await self._connect_shards()
        return await self._clients[call.shard].call(
            call.method, {"m": call.arguments}, returns=returns, timeout_s=timeout_s
        )

    async def aclose(self) -> None:
        """Disconnect. Calls under way end with `ServiceClosedError`."""
        for client in self._clients:
            await client.aclose()
        self.session.close()
