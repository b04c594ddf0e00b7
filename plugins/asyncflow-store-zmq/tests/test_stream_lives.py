"""Readers and writers on an event loop, and over the lives of a store, with and without one."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import numpy as np
import pytest

from asyncflow_core.batch import Batch, Column, GroupKey
from asyncflow_core.errors import DataError, LeaseLostError, PeerLostError, ServiceTimeoutError
from asyncflow_core.services.data_store import TaskSpec
from asyncflow_core.testing.aio import eventually
from asyncflow_store_zmq.blocking import BlockingStore
from asyncflow_store_zmq.options import ZmqOptions
from asyncflow_store_zmq.store import ZmqDataStore

SCORE = TaskSpec("score", ("x",), ("reward",))
TRAIN = TaskSpec("train", ("x", "reward"))


def groups(first, count):
    return Batch({"x": Column.dense(np.arange(first, first + count), np.float32)})


def keys(first, count):
    return [GroupKey(0, 0, first + number) for number in range(count)]


def rewards(item):
    return Batch({"reward": Column.dense(item.batch["x"].array * 2, np.float32)})


async def test_async_streams_carry_rows_from_writer_to_the_last_reader_exactly_once(store):
    for task in (SCORE, TRAIN):
        await store.register(task)

    async def produce():
        writer = store.writer(in_flight=2)
        for number in range(0, 60, 3):
            await writer.put(groups(number, 3), keys=keys(number, 3))
        return await writer.flush()

    async def score():
        reader = store.reader("score", ["x"], requester="s", limit_rows=4, total_rows=60)
        async for item in reader:
            await reader.commit(item, rewards(item))
        await reader.aclose()

    async def train():
        seen = []
        reader = store.reader("train", ["x", "reward"], requester="t", limit_rows=7, total_rows=60)
        async for item in reader:
            assert (item.batch["reward"].array == 2 * item.batch["x"].array).all()
            seen += item.batch["x"].array.tolist()
            await reader.commit(item)
        await reader.aclose()
        return seen

    result, _, seen = await asyncio.wait_for(asyncio.gather(produce(), score(), train()), 60)
    assert (result.stored, result.known) == (60, 0)
    assert sorted(seen) == list(range(60))
    assert (await store.stats()).rows == 0


async def test_async_writer_raises_what_the_store_refused_and_goes_on(store):
    await store.register(SCORE)
    writer = store.writer(partition="elsewhere")
    await writer.put(groups(0, 1), keys=keys(0, 1))
    with pytest.raises(DataError, match="elsewhere"):
        await writer.flush()
    assert (await writer.flush()).stored == 0


async def test_cancelled_step_of_an_async_reader_loses_no_row(store):
    await store.register(SCORE)
    reader = store.reader("score", ["x"], requester="s", limit_rows=1)
    waiting = asyncio.create_task(anext(reader))
    await eventually(lambda: store._connection._clients[-1]._calls)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await store.put(groups(0, 1), keys=keys(0, 1))
    item = await asyncio.wait_for(anext(reader), 30)
    await reader.commit(item, rewards(item))
    await reader.aclose()
    assert (await store.stats()).rows == 0


@pytest.mark.parametrize("prefetch_rows", [0, 4])
async def test_reader_cancelled_at_any_step_still_reads_its_total(store, prefetch_rows):
    await store.register(SCORE)
    connection, number = store._connection, 0
    whole = connection._do

    async def read(fails):
        nonlocal number
        await store.put(groups(0, 20), keys=keys(100 * fails, 20))
        reader = store.reader(
            "score", ["x"], requester="r", limit_rows=4, total_rows=13,
            prefetch_rows=prefetch_rows,
        )  # fmt: skip
        number = 0

        async def do(step, returns):
            nonlocal number
            number += 1
            if number == fails:
                raise asyncio.CancelledError
            return await whole(step, returns)

        connection._do = do
        rows, over = 0, False
        while not over:
            try:
                item = await anext(reader, None)
                over = item is None
                rows += 0 if over else len(item)
            except asyncio.CancelledError:
                assert number == fails
        connection._do = whole
        await store.evict("r")
        left = await store.lease("score", requester="s")
        await store.drop([info.key for info in left.rows], reason="over")
        return rows, len(left.rows)

    fails, found = 0, []
    while number >= fails:
        found.append(await read(fails))
        fails += 1
    assert len(found) > 4
    assert set(found) == {(13, 20)}


@pytest.mark.parametrize("tcp", [False, True])
async def test_reader_cancelled_at_any_turn_of_the_loop_keeps_what_it_asked_for(serve, tcp):
    async with serve(tcp=tcp) as options, ZmqDataStore(ZmqOptions(**options)) as store:
        await store.register(SCORE)
        for turns in range(24):
            await store.put(groups(0, 8), keys=keys(100 * turns, 8))
            reader = store.reader(
                "score", ["x"], requester="r", limit_rows=2, total_rows=8, prefetch_rows=4
            )
            held, over = [], False

            async def step(reader=reader, held=held):
                if not held:
                    held.append(await anext(reader, None))
                if held[0] is not None:
                    await reader.commit(held[0], rewards(held[0]))
                return held.pop() is None

            while not over:
                begun = asyncio.create_task(step())
                for _ in range(turns):
                    await asyncio.sleep(0)
                begun.cancel()
                await asyncio.wait((begun,))
                over = await asyncio.wait_for(step(), 30)
            await reader.aclose()
            task = (await store.stats()).tasks["score"]
            assert (task.committed, task.leased) == (8 * (turns + 1), 0), turns


async def test_reader_that_another_of_its_name_hurried_waits_on(store):
    await store.register(SCORE)
    one = store.reader("score", ["x"], requester="r", limit_rows=1, wait_s=3600.0)
    waiting = asyncio.create_task(anext(one))
    await eventually(lambda: store._connection._clients[-1]._calls)
    await store._opened.run(store._opened.session.hurry("score", "r"))
    await store.put(groups(9, 1), keys=keys(9, 1))
    item = await asyncio.wait_for(waiting, 30)  # and not None, which would be its end
    assert item.batch["x"].array.tolist() == [9]


@pytest.mark.parametrize("tcp", [False, True])
async def test_writer_cancelled_at_any_turn_of_the_loop_forgets_no_put_under_way(serve, tcp):
    async with serve(tcp=tcp) as options, ZmqDataStore(ZmqOptions(**options)) as store:
        await store.register(SCORE)
        number = 0
        for turns in range(12):
            writer = store.writer(in_flight=1)
            for _ in range(4):
                put = asyncio.create_task(writer.put(groups(number, 1), keys=keys(number, 1)))
                for _ in range(turns):
                    await asyncio.sleep(0)
                put.cancel()
                await asyncio.wait((put,))
                await writer.put(groups(number, 1), keys=keys(number, 1))
                number += 1
            result = await asyncio.wait_for(writer.flush(), 30)
            assert result.stored == 4, turns
        assert (await store.stats()).rows == number


async def test_waiting_for_an_answer_that_was_begun_ends_and_may_be_tried_again(store, monkeypatch):
    await store.register(SCORE)
    reader = store.reader("score", ["x"], requester="r", limit_rows=1, wait_s=1.0)
    with monkeypatch.context() as patch:
        patch.setattr("asyncflow_store_zmq.connection._TIMEOUT_S", -0.95)
        with pytest.raises(ServiceTimeoutError):
            await anext(reader)
    await store.put(groups(0, 1), keys=keys(0, 1))
    assert len(await anext(reader)) == 1
    await reader.aclose()


@pytest.mark.multiproc
async def test_task_ended_while_the_controller_is_dead_is_gone_in_the_next_life(tmp_path):
    options = ZmqOptions(durability="journal", directory=tmp_path / "kept", shards=1, restarts=5)
    async with ZmqDataStore(options) as owner:
        scoring = await owner.register(SCORE)

        def use():
            token = owner.attach_options()["token"]
            with BlockingStore(owner.address, token=token, reconnect_s=60.0) as store:
                handle = store.register(TRAIN)
                kill(owner)
                store.end(handle)

        await asyncio.to_thread(use)
        assert list((await owner.stats()).tasks) == ["score"]
        await asyncio.to_thread(kill, owner)
        await scoring.aclose()
        assert not (await owner.stats()).tasks


async def test_lease_of_a_life_before_is_lost_without_durability_too(serve):
    async def hold(store):
        await store.register(SCORE)
        await store.put(groups(0, 1), keys=keys(0, 1))
        return await store.lease("score", requester="r")

    async with serve() as options, ZmqDataStore(ZmqOptions(**options)) as store:
        old = await hold(store)
    async with serve() as options, ZmqDataStore(ZmqOptions(**options)) as store:
        new = await hold(store)
        assert new.lease_id != old.lease_id
        assert await store.renew([old.lease_id, new.lease_id], lease_s=60.0) == (old.lease_id,)
        with pytest.raises(LeaseLostError):
            await store.commit(old.ref())
        assert (await store.stats()).tasks["score"].leased == 1


def test_blocking_store_evicts_what_a_requester_holds(tmp_path):
    async def run():
        async with ZmqDataStore(ZmqOptions(shards=1)) as owner:
            token = owner.attach_options()["token"]

            def use():
                with BlockingStore(owner.address, token=token) as store:
                    store.register(SCORE)
                    store.put(groups(0, 3), keys=keys(0, 3))
                    held = store.lease("score", requester="gone")
                    assert len(held.rows) == 3
                    assert store.evict("gone") == 3
                    assert len(store.lease("score", requester="here").rows) == 3

            await asyncio.to_thread(use)

    asyncio.run(run())


def kill(owner):
    """The controller; who started it starts it again. One killed just before may still be down."""
    end = time.monotonic() + 30
    while True:
        try:
            return os.kill(owner.processes.pids[-1], signal.SIGKILL)
        except ProcessLookupError:
            assert time.monotonic() < end, "the controller did not come back within 30 s"
            time.sleep(0.01)


def write_and_read(owner, connect, token):
    """Rows through a blocking writer and reader while the controller dies; what was read."""
    with BlockingStore(connect, token=token, reconnect_s=60.0) as store:
        handle = store.register(SCORE)
        writer = store.writer(in_flight=4)
        for number in range(40):
            batch = groups(number, 1)
            writer.put(batch, keys=keys(number, 1))
            batch["x"].array[:] = -1  # it is the caller's own again
            if number in (10, 25):
                kill(owner)
        written = writer.flush()
        seen, lost = [], 0
        reader = store.reader("score", ["x"], requester="s", limit_rows=2, wait_s=2.0)
        while True:
            try:
                item = next(reader)
                seen += item.batch["x"].array.tolist()
                if len(seen) in (10, 24):
                    kill(owner)
                reader.commit(item, rewards(item))
            except StopIteration:
                if not store.stats().rows:
                    break
                reader = store.reader("score", ["x"], requester="s", limit_rows=2, wait_s=2.0)
            except LeaseLostError:
                lost += 1
        store.end(handle)
        return written, seen, lost


@pytest.mark.multiproc
@pytest.mark.parametrize("bind", ["", "tcp://127.0.0.1:*"], ids=["ipc", "tcp"])
async def test_blocking_streams_go_on_when_a_killed_controller_comes_back(bind, tmp_path):
    options = ZmqOptions(
        durability="journal", directory=tmp_path / "kept", shards=1, bind=bind, restarts=5
    )
    async with ZmqDataStore(options) as owner:
        token = owner.attach_options()["token"]
        work = asyncio.to_thread(write_and_read, owner, owner.address, token)
        written, seen, lost = await asyncio.wait_for(work, 120)
        assert written.stored == 40
        assert set(seen) == set(range(40))
        assert len(seen) - 40 <= 4 * 64  # only what was on its way comes twice
        assert lost <= 4
        stats = await owner.stats()
        assert (stats.rows, stats.rows_dropped) == (0, {})


@pytest.mark.multiproc
async def test_async_streams_go_on_when_a_killed_controller_comes_back(tmp_path):
    options = ZmqOptions(durability="journal", directory=tmp_path / "kept", shards=1, restarts=5)
    async with ZmqDataStore(options) as owner:
        await owner.register(SCORE)
        writer = owner.writer(in_flight=4)
        for number in range(40):
            await writer.put(groups(number, 1), keys=keys(number, 1))
            if number in (10, 25):
                await asyncio.to_thread(kill, owner)
        assert (await writer.flush()).stored == 40
        seen, kills = set(), 0
        reader = owner.reader("score", ["x"], requester="s", limit_rows=2, wait_s=5.0)
        while (await owner.stats()).rows:
            try:
                item = await anext(reader)
                seen |= set(item.batch["x"].array.tolist())
                if len(seen) == 10 and not kills:
                    kills += 1
                    await asyncio.to_thread(kill, owner)
                await reader.commit(item, rewards(item))
                await reader.flush()
            except LeaseLostError:
                continue
        assert (seen, kills) == (set(range(40)), 1)
        await reader.aclose()


@pytest.mark.multiproc
async def test_blocking_store_that_nobody_waits_for_says_so():
    async with ZmqDataStore(ZmqOptions(shards=1)) as owner:
        token = owner.attach_options()["token"]

        def use():
            with BlockingStore(owner.address, token=token) as store:
                store.register(SCORE)
                kill(owner)
                with pytest.raises(PeerLostError, match="nobody waits for it to come back"):
                    store.lease("score", requester="s", wait_s=30.0)

        await asyncio.to_thread(use)
