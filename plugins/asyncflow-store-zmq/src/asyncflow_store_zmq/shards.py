"""The controller's shards: a connection to each process, and its memory, mapped."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import numpy as np

from asyncflow_core.errors import PeerLostError
from asyncflow_core.wire import Client
from asyncflow_store_zmq.arena import Arena
from asyncflow_store_zmq.extents import Extent, Hole, Segment
from asyncflow_store_zmq.spec import StoreSpec

__all__ = ["Shards"]

_PATIENCE_S = 30.0
_AGAIN_S = 0.1


class Shards:
    """By number.

    Attributes:
        arenas: their memory. addresses: where their processes answer.
    """

    def __init__(self, spec: StoreSpec) -> None:
        """None yet."""
        self._spec = spec
        self._clients: list[Client] = []
        self.arenas: list[Arena] = []
        self.addresses: list[str] = []

    async def add(self, address: str) -> None:
        """The next in number answers there.

        Raises:
            PeerLostError: it does not, for half a minute.
        """
        client = await self._connect(address)
        self.arenas.append(Arena(self._spec.arena(len(self.arenas))))
        self._clients.append(client)
        self.addresses.append(address)

    async def _connect(self, address: str) -> Client:
        """To a shard, which may be dying at this moment, or come up."""
        spec = self._spec
        deadline = asyncio.get_running_loop().time() + _PATIENCE_S
        while True:
            client = Client(address, name="controller", token=spec.token, keys=spec.key_pair())
            try:
                await client.open()
            except PeerLostError:
                if asyncio.get_running_loop().time() >= deadline:
                    raise
                await asyncio.sleep(_AGAIN_S)
            else:
                return client

    async def sync(self) -> None:
        """Wait until what was written is on their disks."""
        await asyncio.gather(*map(self._sync, range(len(self._clients))))

    async def _sync(self, number: int) -> None:
        try:
            await self._clients[number].call("shard.sync", {"m": []})
        except PeerLostError:
            # Its memory is a file that outlives it, and its process is started again.
            await self._clients[number].aclose()
            self._clients[number] = await self._connect(self.addresses[number])
            await self._sync(number)

    async def aclose(self) -> None:
        """Let go of them."""
        for client in self._clients:
            await client.aclose()

    # Their memory

    def raise_generation(self, shard: int, slot: int) -> int:
        """Memory is lent anew: readers of what lay there before see the number that comes back."""
        generations = self.arenas[shard].generations
        generations[slot] += np.uint32(1)
        return int(generations[slot])

    def lent(self, extent: Extent) -> None:
        """Write down how much was ever lent."""
        arena = self.arenas[extent.shard]
        arena.top = max(arena.top, extent.slot + extent.units)

    def has(self, segment: Segment) -> bool:
        """Whether something was written at the start of a segment."""
        extent = segment.extent
        return self.arenas[extent.shard].holds(segment.start, extent.slot, segment.generation)

    def punch(self, holes: Iterable[Hole]) -> None:
        """Give pages back, before their memory is lent again: so not in the shards' processes."""
        for hole in holes:
            self.arenas[hole.shard].punch(hole.start, hole.nbytes)

    def allocated(self) -> int:
        """Bytes they take."""
        return sum(arena.allocated() for arena in self.arenas)
