"""A shard that dies is started again: whoever reaches it over TCP goes on, durable or not."""

from __future__ import annotations

import asyncio
import os
import signal

import numpy as np
import pytest

from asyncflow_core.batch import Batch, Column, GroupKey
from asyncflow_core.services.data_store import TaskSpec
from asyncflow_store_zmq.blocking import BlockingStore
from asyncflow_store_zmq.options import ZmqOptions
from asyncflow_store_zmq.store import ZmqDataStore

pytestmark = pytest.mark.multiproc
LOG = TaskSpec("log", ("x",))


def groups(number):
    return Batch({"x": Column.dense([number], np.float32)}), [GroupKey(0, 0, number)]


async def test_clients_over_tcp_go_on_when_a_shard_was_killed():
    async with ZmqDataStore(ZmqOptions(shards=1, bind="tcp://127.0.0.1:*")) as owner:
        await owner.register(LOG)
        batch, keys = groups(0)
        await owner.put(batch, keys=keys)
        lease = await owner.lease("log", requester="a")

        def use():
            token = owner.attach_options()["token"]
            with BlockingStore(owner.address, token=token) as store:
                batch, keys = groups(1)
                store.put(batch, keys=keys)
                os.kill(owner.processes.pids[0], signal.SIGKILL)
                batch, keys = groups(2)
                store.put(batch, keys=keys)
                rest = store.lease("log", requester="b")
                return store.read(rest.ref(), ["x"])["x"].array.tolist()

        rest = asyncio.to_thread(use)
        assert await asyncio.wait_for(rest, 60) == [1, 2]
        reads = [owner.read(lease.ref(), ["x"]) for _ in range(3)]
        for found in await asyncio.wait_for(asyncio.gather(*reads), 60):
            assert found["x"].array.tolist() == [0]
