"""Rows whose columns were promised and never written: dropped with a reason, never a hurdle."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asyncflow_core.batch import Batch, Column, GroupKey
from asyncflow_core.errors import LeaseLostError
from asyncflow_core.services.data_store import TaskSpec
from asyncflow_core.wire import Client
from asyncflow_store_zmq.layout import pack
from asyncflow_store_zmq.options import ZmqOptions
from asyncflow_store_zmq.packed import dump_keys
from asyncflow_store_zmq.store import ZmqDataStore
from asyncflow_store_zmq.unwritten import UNWRITTEN

from .conftest import TOKEN, served

TASK = TaskSpec("train", ("x",))


def values(first, count):
    return Batch({"x": Column.dense(np.arange(first, first + count), np.float32)})


async def promise(liar, first, count):
    """Put rows without a byte of them."""
    shard, slot, _ = await liar.call("store.lend", {"m": [1 << 20, []]})
    packed = pack(values(first, count))
    written = [shard, slot, slot << 20, packed.nbytes, count, packed.layout.dump()]
    keys = dump_keys([(0, 0, first + number) for number in range(count)], 3)
    facts = [bytes(4 * count), b"\xff" * 4 * count]
    how = [1, None, "train", 0, 0.0, [[[shard, slot]], 0]]
    await liar.call("store.put", {"m": [written, keys, *facts, *how]})


async def read_all(store, rows, limit):
    """What a reader gets that goes on after each failure, and how often it failed."""
    found, failures = [], 0
    while (lease := await store.lease("train", requester="r", limit_rows=limit)) is not None:
        try:
            batch = await store.read(lease.ref(), ["x"])
        except LeaseLostError:
            failures += 1
            assert failures <= rows  # each time a row is gone for good
            await store.release(lease.ref())
            continue
        assert batch["x"].array.tolist() == [info.key.sequence for info in lease.rows]
        found += batch["x"].array.tolist()
        await store.commit(lease.ref())
    return found, failures


async def go_through(puts, limit, *, tcp):
    directory = Path(tempfile.mkdtemp(prefix="af-"))
    try:
        async with contextlib.AsyncExitStack() as stack:
            options = await stack.enter_async_context(served(directory, tcp=tcp))
            store = await stack.enter_async_context(ZmqDataStore(ZmqOptions(**options)))
            liar = Client(options["connect"], name="liar", token=TOKEN)
            await stack.enter_async_context(liar)
            await store.register(TASK)
            first, written = 0, []
            for count, honest in puts:
                if honest:
                    keys = [GroupKey(0, 0, first + number) for number in range(count)]
                    await store.put(values(first, count), keys=keys)
                    written += range(first, first + count)
                else:
                    await promise(liar, first, count)
                first += count
            found, failures = await read_all(store, first, limit)
            stats = await store.stats()
            return first, written, found, failures, stats
    finally:
        shutil.rmtree(directory)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=6),
    st.integers(1, 8),
    st.booleans(),
)
@example([(3, False)], 2, False)
@example([(2, True), (1, False), (2, True)], 8, True)
def test_unwritten_rows_end_dropped_with_a_reason_and_all_others_are_read_once(puts, limit, tcp):
    rows, written, found, failures, stats = asyncio.run(go_through(puts, limit, tcp=tcp))
    lost = rows - len(written)
    assert sorted(found) == written
    assert stats.rows_dropped == ({UNWRITTEN: lost} if lost else {})
    assert sorted(one.group.sequence for one in stats.dropped_groups) == sorted(
        set(range(rows)) - set(written)
    )
    assert {one.reason for one in stats.dropped_groups} <= {UNWRITTEN}
    assert (stats.rows, stats.reserved_rows) == (0, 0)
    assert bool(failures) == bool(lost)


async def test_rows_that_are_there_are_not_dropped_by_who_says_they_are_not(store):
    await store.register(TASK)
    await store.put(values(0, 3), keys=[GroupKey(0, 0, number) for number in range(3)])
    lease = await store.lease("train", requester="r")
    liar = Client(store.address, name="liar", token=TOKEN)
    async with liar:
        rows = dump_keys([(info.row,) for info in lease.rows], 1)
        call = {"m": [lease.lease_id, lease.fence, rows]}
        assert await liar.call("store.missing", call) == 0
    assert (await store.read(lease.ref(), ["x"]))["x"].array.tolist() == [0, 1, 2]
    await store.commit(lease.ref())
    with pytest.raises(LeaseLostError):
        await store.read(lease.ref(), ["x"])
