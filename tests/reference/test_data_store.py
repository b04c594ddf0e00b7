"""What only the in-process store promises: sharing, copies, its clock."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from asyncflow_core.batch import Batch, Column, GroupKey
from asyncflow_core.errors import ConfigError, DataError, UnsupportedCapabilityError
from asyncflow_core.reference.data_store import InProcessDataStore
from asyncflow_core.services.data_store import TaskSpec
from asyncflow_core.testing.aio import eventually

READ = TaskSpec("read", ("prompt_ids",))
WORK = TaskSpec("work", ("prompt_ids",), ("note",))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store(clock):
    async with InProcessDataStore(clock=clock) as store:
        yield store


def prompt(length: int = 4) -> Batch:
    return Batch({"prompt_ids": Column.ragged([np.arange(length)], np.int32)})


KEY = GroupKey(0, 0, 0)


async def test_put_group_of_many_samples_stores_shared_columns_once(store):
    await store.register(READ)
    await store.put(prompt(1000), keys=[KEY], samples=64)
    assert (await store.stats()).bytes == 4000
    lease = await store.lease("read", requester="a")
    batch = await store.read(lease.ref(), ["prompt_ids"])
    assert batch["prompt_ids"].array.nbytes == 64 * 4000
    await store.commit(lease.ref(lease.rows[:63]))
    assert (await store.stats()).bytes == 4000
    await store.commit(lease.ref(lease.rows[63:]))
    assert (await store.stats()).bytes == 0


async def test_stored_rows_neither_pin_nor_follow_the_callers_buffer(store):
    await store.register(READ)
    groups = prompt()
    await store.put(groups, keys=[KEY])
    groups["prompt_ids"].array[:] = 99
    lease = await store.lease("read", requester="a")
    out = await store.read(lease.ref(), ["prompt_ids"])
    assert out["prompt_ids"].array.tolist() == [0, 1, 2, 3]
    out["prompt_ids"].array[:] = 77
    again = await store.read(lease.ref(), ["prompt_ids"])
    assert again["prompt_ids"].array.tolist() == [0, 1, 2, 3]


async def test_column_of_another_layout_than_before_is_refused(store):
    await store.register(WORK)
    await store.put(prompt().take([0, 0]), keys=[KEY, GroupKey(0, 0, 1)])
    lease = await store.lease("work", requester="a")
    first, second = lease.ref(lease.rows[:1]), lease.ref(lease.rows[1:])
    await store.commit(first, writes=Batch({"note": Column.objects(["x"])}))
    with pytest.raises(DataError, match="one layout"):
        await store.commit(second, writes=Batch({"note": Column.dense([1.0])}))


async def test_lease_expires_by_the_injected_clock(store, clock):
    await store.register(READ)
    await store.put(prompt(), keys=[KEY])
    await store.lease("read", requester="a", lease_s=3.0)
    clock.now = 2.9
    assert await store.lease("read", requester="b") is None
    clock.now = 3.0
    assert await store.lease("read", requester="b") is not None


async def test_stopped_process_keeps_its_leases(store, clock):
    await store.register(READ)
    await store.put(prompt(), keys=[KEY])
    lease = await store.lease("read", requester="a", lease_s=3.0)
    clock.now = 500.0
    assert (await store.commit(lease.ref())).committed == 1


async def test_timer_expires_a_lease_while_nobody_calls():
    async with InProcessDataStore() as store:
        await store.register(READ)
        await store.put(prompt(), keys=[KEY])
        await store.lease("read", requester="a", lease_s=0.02)
        ledger = store._ledger  # `stats` of the store would itself look at the clock
        await eventually(lambda: ledger.stats().tasks["read"].expired == 1)


async def test_waiting_lease_of_a_task_that_ends_is_told(store):
    registration = await store.register(READ)
    waiting = asyncio.create_task(store.lease("read", requester="a", wait_s=30.0))
    await asyncio.sleep(0)
    await registration.aclose()
    with pytest.raises(ConfigError, match="'read'"):
        await waiting


async def test_cancelled_put_leaves_its_turn_to_the_next():
    async with InProcessDataStore(capacity_rows=1) as store:
        await store.register(READ)
        await store.put(prompt(), keys=[KEY])
        puts = [asyncio.create_task(store.put(prompt(), keys=[GroupKey(0, 0, i)])) for i in (1, 2)]
        await asyncio.sleep(0)
        puts[0].cancel()
        lease = await store.lease("read", requester="a")
        await store.commit(lease.ref())
        assert (await asyncio.wait_for(puts[1], 5.0)).stored == 1
        assert (await store.stats()).waiting_puts == 0


async def test_registration_outlives_the_store_quietly():
    async with InProcessDataStore() as store:
        registration = await store.register(READ)
    await registration.aclose()


def test_durability_on_disk_is_refused():
    with pytest.raises(UnsupportedCapabilityError, match="disk"):
        InProcessDataStore(durability="disk")
