"""The reference store, used from another connection as in its own process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from asyncflow_core.batch import Batch, Column, GroupKey
from asyncflow_core.errors import LeaseLostError, ServiceTimeoutError
from asyncflow_core.reference.data_store import InProcessDataStore
from asyncflow_core.services.data_store import DataStore, TaskSpec
from asyncflow_core.wire import Client, Server, remote, serve_service

TOKEN = "token-of-this-run"
PROMPTS = Batch({"prompt_ids": Column.ragged([np.arange(900, dtype=np.int32)] * 4)})
KEYS = [GroupKey(0, 0, i) for i in range(4)]
REWARD = TaskSpec("reward", ("prompt_ids",), ("reward",))


@pytest.fixture
async def store(run_dir: Path) -> AsyncIterator[DataStore]:
    server = Server(f"ipc://{run_dir}/s", name="store-0", token=TOKEN)
    async with InProcessDataStore(capacity_rows=8) as inner:
        serve_service(server, "store", inner, DataStore)
        async with (
            server,
            Client(server.address, name="w", token=TOKEN) as client,
            remote(DataStore, client, "store", timeout_s=5) as proxy,
        ):
            yield proxy


async def test_rows_go_through_lease_read_and_commit(store: DataStore) -> None:
    registration = await store.register(REWARD)
    waiting = asyncio.create_task(store.lease("reward", requester="w", wait_s=30))
    put = await store.put(PROMPTS, keys=KEYS, samples=2)
    assert (put.stored, put.known) == (4, 0)
    lease = await waiting
    assert lease is not None
    read = await store.read(lease.ref(), ["prompt_ids"])
    np.testing.assert_array_equal(read["prompt_ids"][0], np.arange(900))
    rewards = Batch({"reward": Column.dense(np.ones(read.rows, np.float32))})
    done = await store.commit(lease.ref(), writes=rewards)
    assert done.committed == len(lease.rows)
    await registration.aclose()
    assert (await store.stats()).tasks == {}


async def test_errors_keep_their_kind(store: DataStore) -> None:
    await store.register(REWARD)
    await store.put(PROMPTS, keys=KEYS, samples=2)
    with pytest.raises(ServiceTimeoutError):
        await store.put(PROMPTS, keys=[GroupKey(0, 1, i) for i in range(4)], samples=2, wait_s=0.05)
    lease = await store.lease("reward", requester="w", limit_rows=1)
    assert lease is not None
    await store.release(lease.ref())
    with pytest.raises(LeaseLostError):
        await store.read(lease.ref(), ["prompt_ids"])
