"""A replica of `benchmarks/weights.py` in a process of its own, and how to start some."""

from __future__ import annotations

import asyncio
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncflow_core.parts import PartContext
from asyncflow_core.registry import Registry
from asyncflow_core.services.weight_sync import Checksum, PublishedWeights, TensorSpec, WeightSync
from asyncflow_core.wire import Client, Server, remote, serve_object

TOKEN = "bench"
_PIECE = 64 << 20


@dataclass(frozen=True)
class Received:
    """One version taken in: seconds of the parts, and what lies there now."""

    wall_s: float
    copy_s: float
    verify_s: float
    checksum: str


class Replica:
    """Memory that takes versions in; stands for an engine's second set of weights."""

    def __init__(self, plugin: str, options: dict[str, Any], run_dir: str) -> None:
        self._plugin, self._options, self._run_dir = plugin, options, run_dir
        self._sync: WeightSync | None = None
        self._target = self._source = np.empty(0, np.uint8)

    async def _opened(self) -> WeightSync:
        if self._sync is None:
            self._sync = make_sync(self._plugin, self._options, Path(self._run_dir))
            await self._sync.open()
        return self._sync

    async def prepare(self, nbytes: int, with_source: bool) -> None:
        """Touch the memory, so that its pages are there."""
        self._target = np.zeros(nbytes, np.uint8)
        self._source = np.full(nbytes if with_source else 0, 7, np.uint8)
        self._target[...] = 1

    async def memcpy_s(self) -> float:
        """Seconds to copy as many private bytes, in pieces as a bucket."""
        start = time.perf_counter()
        for at in range(0, len(self._source), _PIECE):
            np.copyto(self._target[at : at + _PIECE], self._source[at : at + _PIECE])
        return time.perf_counter() - start

    async def raw_s(self, port: int) -> float:
        """Seconds to read as many bytes from a plain socket."""
        return await asyncio.to_thread(self._raw, port)

    def _raw(self, port: int) -> float:
        view: Any = memoryview(self._target)  # type: ignore[arg-type]
        with socket.create_connection(("127.0.0.1", port)) as connection:
            start, at = time.perf_counter(), 0
            while at < len(view):
                at += connection.recv_into(view[at : at + (4 << 20)])
            return time.perf_counter() - start

    async def receive(self, published: PublishedWeights, copy: bool) -> Received:
        """Fetch a version, copy it where `copy` says so, then checksum what lies there."""
        sync = await self._opened()
        start = time.perf_counter()
        source = await sync.fetch(published)
        assert source.buckets is not None
        copy_s, at, checksum = 0.0, 0, Checksum()
        pieces: list[tuple[TensorSpec, NDArray[np.uint8]]] = []
        async for bucket in source.buckets:
            before = time.perf_counter()
            data = bucket.data
            if copy:
                data = self._target[at : at + len(bucket.data)]
                np.copyto(data, bucket.data)
            copy_s += time.perf_counter() - before
            at += len(bucket.data)
            pieces += [(s, data[s.offset : s.offset + s.nbytes]) for s in bucket.specs]
        wall_s = time.perf_counter() - start
        before = time.perf_counter()
        for spec, tensor in pieces:
            checksum.add(spec.name, spec.dtype, spec.shape, tensor)
        verify_s = time.perf_counter() - before
        return Received(wall_s, copy_s, verify_s, checksum.hexdigest())

    async def received_bytes(self) -> int:
        """That crossed the network."""
        return (await (await self._opened()).stats()).bytes_received


def make_sync(plugin: str, options: dict[str, Any], run_dir: Path) -> WeightSync:
    """A transport by name."""
    found = Registry().get("weight_sync", plugin)
    made: WeightSync = found.factory(
        found.parse_options(options),
        PartContext(f"weights-{secrets.token_hex(2)}", run_dir=run_dir),
    )
    return made


@asynccontextmanager
async def replicas(
    count: int, plugin: str, options: dict[str, Any], run_dir: Path
) -> AsyncIterator[list[Replica]]:
    """Replicas in processes of their own; they are killed at the end."""
    async with AsyncExitStack() as stack:
        found = []
        for _ in range(count):
            address = f"ipc://{run_dir}/r{secrets.token_hex(3)}"
            child = subprocess.Popen(  # noqa: ASYNC220 - it returns at once
                [sys.executable, __file__, address, plugin, repr(options), str(run_dir)]
            )
            stack.callback(child.wait)
            stack.callback(child.kill)
            client = Client(address, name="bench", token=TOKEN, timeout_s=600)
            await stack.enter_async_context(client)
            found.append(remote(Replica, client, "replica"))
        yield found


async def _serve(address: str, replica: Replica) -> None:
    server = Server(address, name="replica", token=TOKEN)
    serve_object(server, "replica", replica)
    async with server:
        await asyncio.Event().wait()


if __name__ == "__main__":
    import ast

    where, name, given, directory = sys.argv[1:]
    asyncio.run(_serve(where, Replica(name, ast.literal_eval(given), directory)))
