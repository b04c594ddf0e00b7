"""Hand-outs that wait: who came first gets the rows, who is gone gets none, nobody is forgotten."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from asyncflow_core.batch import Batch, Column, GroupKey
from asyncflow_core.errors import ConfigError
from asyncflow_core.services.data_store import TaskSpec
from asyncflow_core.testing.aio import eventually
from asyncflow_core.wire import Peer
from asyncflow_store_zmq.blocking import BlockingStore
from asyncflow_store_zmq.handouts import Handouts

from .conftest import TOKEN

TASK = TaskSpec("train", ("x",))


async def put(store, first, count=1):
    rows = Batch({"x": Column.dense(np.arange(first, first + count), np.float32)})
    await store.put(rows, keys=[GroupKey(0, 0, first + number) for number in range(count)])


def wait(store, requester, rows=1):
    return asyncio.create_task(
        store.lease("train", requester=requester, limit_rows=rows, wait_s=30.0)
    )


async def under_way(store, count):
    """So many calls have left, and the store has them: it answers calls in their order."""
    await eventually(lambda: len(store._connection._clients[-1]._calls) == count)
    await store.stats()


def sequences(lease):
    return [info.key.sequence for info in lease.rows]


async def test_rows_go_to_waiters_in_the_order_in_which_they_came(store):
    await store.register(TASK)
    waiting = [wait(store, f"r{number}", rows=2) for number in range(3)]
    await under_way(store, 3)
    await put(store, 0, 3)
    assert sequences(await waiting[0]) == [0, 1]
    assert sequences(await waiting[1]) == [2]
    assert not waiting[2].done()
    await put(store, 3)
    assert sequences(await waiting[2]) == [3]


async def test_row_goes_to_the_next_when_the_first_waiter_left(store):
    await store.register(TASK)
    first, second = wait(store, "first"), wait(store, "second")
    await under_way(store, 2)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await store.stats()
    await put(store, 0)
    assert sequences(await second) == [0]
    assert (await store.stats()).tasks["train"].leased == 1


async def test_rows_for_a_waiter_cancelled_as_they_came_go_to_the_next():
    rows, followed = [], []

    def lease(m):
        return [rows.pop()] if rows else None

    def follow():
        followed.append(len(rows))
        handouts.serve("train")

    handouts = Handouts(lease, rows.extend, lambda _: len(rows), follow)
    call = ["train", "r", None, None, None, "fifo", 60.0, 30.0]
    first, second = (
        asyncio.create_task(handouts.wait(call, Peer(b"", name), lambda found: found).wait())
        for name in ("first", "second")
    )
    await asyncio.sleep(0)
    rows.append("row")
    handouts.serve("train")
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await asyncio.wait_for(second, 30) == ["row"]
    assert followed == [1]


async def test_rows_that_came_before_the_first_step_of_a_call_cancelled_then_are_given_back():
    rows = []
    handouts = Handouts(lambda _: [rows.pop()] if rows else None, rows.extend, lambda _: 1, list)
    call = ["train", "r", None, None, None, "fifo", 60.0, 30.0]
    later = handouts.wait(call, Peer(b"", "first"), lambda found: found)
    rows.append("row")
    waiting = asyncio.create_task(later.wait())
    handouts.serve("train")
    assert rows == []
    asyncio.get_running_loop().call_soon(waiting.cancel)  # after its first step
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert rows == ["row"]


async def test_all_waiters_learn_that_their_task_ended(store):
    registration = await store.register(TASK)
    waiting = [wait(store, f"r{number}") for number in range(3)]
    await under_way(store, 3)
    await registration.aclose()
    for one in waiting:
        with pytest.raises(ConfigError, match="no task 'train'"):
            await one


async def test_rows_for_a_client_of_the_lane_that_left_go_to_who_waits_behind_it(serve):
    async with serve() as options:

        def leave_while_waiting():
            with BlockingStore(options["connect"], token=TOKEN) as client:
                client.register(TASK)
                connection = client._connection
                reader = client.reader("train", ["x"], requester="gone", limit_rows=1)
                connection.run(reader._stream._ask_ahead())

        await asyncio.to_thread(leave_while_waiting)

        def go_on():
            with BlockingStore(options["connect"], token=TOKEN) as client:
                client.register(TASK)
                rows = Batch({"x": Column.dense([1.0], np.float32)})
                client.put(rows, keys=[GroupKey(0, 0, 0)])
                return client.lease("train", requester="here", wait_s=30.0)

        assert sequences(await asyncio.to_thread(go_on)) == [0]
