"""A store whose controller and shards answer from this process: all but the processes is real."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest

from asyncflow_core.wire import Server
from asyncflow_store_zmq.controller import Controller
from asyncflow_store_zmq.options import ZmqOptions
from asyncflow_store_zmq.shard import Shard
from asyncflow_store_zmq.spec import StoreSpec
from asyncflow_store_zmq.store import ZmqDataStore

TOKEN = "token of this test"


@contextlib.asynccontextmanager
async def served(directory, *, tcp=False, shards=1, durability="none", **how):
    """Options with which clients connect."""
    directory.chmod(0o700)
    how = {"capacity_rows": 4096, "capacity_bytes": 1 << 30, "max_staleness": 0, **how}
    spec = StoreSpec(
        directory=str(directory),
        sockets=str(directory),
        address="tcp://127.0.0.1:*" if tcp else f"ipc://{directory}/c",
        token=TOKEN,
        shards=shards,
        durability=durability,
        max_gap_s=5.0,
        **how,
    )
    async with contextlib.AsyncExitStack() as stack:
        addresses = []
        for number in range(shards):
            server = Server(spec.shard_address(number), name=f"shard-{number}", token=TOKEN)
            Shard(spec, number).expose(server)
            await stack.enter_async_context(server)
            addresses.append(server.address)
        controller = Controller(dataclasses.replace(spec, shard_addresses=tuple(addresses)))
        await controller.open()
        stack.push_async_callback(controller.aclose)
        server = Server(spec.address, name="store", token=TOKEN)
        controller.expose(server)
        await stack.enter_async_context(server)
        yield {"connect": server.address, "token": TOKEN}


@pytest.fixture
def serve(tmp_path):
    """`served` in a directory of the test."""

    def start(**how):
        return served(tmp_path, **how)

    return start


@pytest.fixture
async def store(serve):
    """A connected store of one shard."""
    async with serve() as options, ZmqDataStore(ZmqOptions(**options)) as store:
        yield store
