"""Memory that was given back: who reads too late is told so, who still holds rows reads them."""

from __future__ import annotations

import asyncio
import ctypes
import errno

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow_core.batch import Batch, BatchRef, Column, GroupKey
from asyncflow_core.errors import LeaseLostError
from asyncflow_core.services.data_store import TaskSpec
from asyncflow_store_zmq import arena as arena_module
from asyncflow_store_zmq import extents
from asyncflow_store_zmq.arena import UNIT, Arena
from asyncflow_store_zmq.options import ZmqOptions
from asyncflow_store_zmq.shards import Shards
from asyncflow_store_zmq.store import ZmqDataStore

TASK = TaskSpec("train", ("x",))


def groups(rows, value, width=4096):
    return Batch({"x": Column.dense(np.full((rows, width), value), np.float32)})


def keys(source, rows):
    return [GroupKey(source, 0, number) for number in range(rows)]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 9000), st.integers(1, 20_000))
def test_hole_is_zeros_and_what_lies_around_it_stays(tmp_path_factory, start, nbytes):
    check_hole(tmp_path_factory, start, nbytes)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 9000), st.integers(1, 20_000))
def test_hole_is_zeros_where_the_file_system_makes_none(tmp_path_factory, start, nbytes):
    class Deaf:
        """The system's library, on ramfs or some network file systems."""

        fstatfs = arena_module._libc.fstatfs

        def fallocate(self, *_):
            ctypes.set_errno(errno.EOPNOTSUPP)
            return -1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arena_module, "_libc", Deaf())
        check_hole(tmp_path_factory, start, nbytes)


def check_hole(tmp_path_factory, start, nbytes):
    arena = Arena(tmp_path_factory.mktemp("arena") / "a", create=True)
    arena.reserve(UNIT, 32_768)
    memory = arena.data[UNIT : UNIT + 32_768]
    memory[:] = 7
    arena.punch(UNIT + start, nbytes)
    assert not memory[start : start + nbytes].any()
    assert (memory[:start] == 7).all()
    assert (memory[start + nbytes :] == 7).all()
    arena.close()


@pytest.mark.parametrize("tcp", [False, True])
@pytest.mark.parametrize("width", [4096, 300])
async def test_rows_whose_pages_were_given_back_are_lost_not_zeros(serve, monkeypatch, tcp, width):
    monkeypatch.setattr(extents, "_GRACE_S", -1.0)
    async with (
        serve(tcp=tcp, capacity_rows=20_000) as options,
        ZmqDataStore(ZmqOptions(**options)) as reader,
        ZmqDataStore(ZmqOptions(**options)) as producer,
    ):
        await reader.register(TASK)
        await producer.put(groups(8, 1.0, width), keys=keys(0, 8))
        await producer.put(groups(8, 2.0, width), keys=keys(1, 8))
        lease = await reader.lease("train", requester="a", limit_rows=8)
        rest = await reader.lease("train", requester="a")
        await producer.drop([row.key for row in lease.rows], reason="test")
        # Full, as the controller sees it, once another extent is wanted; then holes are made.
        for number in range(2, 4):
            rows = (5 << 20) // (4 * width)
            await producer.put(groups(rows, 3.0, width), keys=keys(number, rows))
        await producer.stats()
        with pytest.raises(LeaseLostError):
            await reader.read(lease.ref(), ["x"])
        assert ((await reader.read(rest.ref(), ["x"]))["x"].array == 2.0).all()


@pytest.mark.parametrize("tcp", [False, True])
async def test_rest_of_a_lease_is_read_after_the_others_memory_was_lent_again(serve, tcp):
    async with (
        serve(tcp=tcp, capacity_rows=20_000) as options,
        ZmqDataStore(ZmqOptions(**options)) as reader,
    ):
        await reader.register(TASK)
        async with ZmqDataStore(ZmqOptions(**options)) as first:
            await first.put(groups(500, 1.0), keys=keys(0, 500))  # an extent of its own
        await reader.put(groups(4, 2.0), keys=keys(1, 4))
        lease = await reader.lease("train", requester="a")
        rows = lease.ref().rows
        done = BatchRef(lease.lease_id, lease.fence, rows[:500])
        rest = BatchRef(lease.lease_id, lease.fence, rows[500:])
        assert ((await reader.read(rest, ["x"]))["x"].array == 2.0).all()
        await reader.commit(done)
        for number in range(2, 6):
            await reader.put(groups(500, 3.0), keys=keys(number, 500))
        assert ((await reader.read(rest, ["x"]))["x"].array == 2.0).all()
        with pytest.raises(LeaseLostError):
            await reader.read(done, ["x"])


async def test_memory_is_kept_until_the_disk_knows_that_its_rows_are_done(
    serve, tmp_path, monkeypatch
):
    free = asyncio.Event()
    free.set()
    sync = Shards.sync

    async def slow(self):
        await free.wait()
        await sync(self)

    monkeypatch.setattr(Shards, "sync", slow)
    async with (
        serve(durability="fsync", capacity_rows=20_000) as options,
        ZmqDataStore(ZmqOptions(**options)) as store,
    ):
        await store.register(TASK)
        await store.put(groups(4, 1.0), keys=keys(0, 4))
        await store.put(groups(320, 2.0), keys=keys(1, 320))  # into another extent
        lease = await store.lease("train", requester="a", limit_rows=4)
        arena = Arena(tmp_path / "shard-0.arena")
        first = arena.data[UNIT : UNIT + 8]
        free.clear()
        commit = asyncio.create_task(store.commit(lease.ref()))
        while (await store.stats()).rows > 320:
            pass
        await store.stats()
        assert first.any()  # a controller that dies now finds the rows alive when it reads back
        free.set()
        await commit
        await store.stats()
        assert not first.any()
        del first
        arena.close()
