"""What callers give by mistake is refused in words, before anything of it is kept."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest

from asyncflow_core.batch import Batch, BatchRef, Column, GroupKey, Key
from asyncflow_core.errors import ConfigError, DataError
from asyncflow_core.services.data_store import TaskSpec
from asyncflow_core.testing.aio import eventually
from asyncflow_store_zmq.arena import UNIT
from asyncflow_store_zmq.blocking import BlockingStore
from asyncflow_store_zmq.extents import LENT_BYTES
from asyncflow_store_zmq.layout import ColumnLayout, Layout
from asyncflow_store_zmq.memory import Call
from asyncflow_store_zmq.options import ZmqOptions
from asyncflow_store_zmq.store import ZmqDataStore

LOG = TaskSpec("log", ("x",))


def numbers(count, dtype=np.float32):
    return Batch({"x": Column.dense(np.arange(count), dtype)})


def keys(first, count):
    return [GroupKey(0, 0, first + i) for i in range(count)]


# Times

WAITS = [-0.5, -60.0, -61.0, -math.inf]


@pytest.mark.parametrize("tcp", [False, True])
async def test_negative_waits_are_none_and_what_is_no_number_is_refused_alone(serve, tcp):
    def run(options):
        with BlockingStore(options["connect"], token=options["token"]) as store:
            store.register(LOG)
            for wait_s in WAITS:
                assert store.lease("log", requester="a", wait_s=wait_s) is None
                assert store.wait_weights(after=0, wait_s=wait_s) is None
                assert store.stats(wait_s=wait_s).rows == 0
            for call in calls(store):
                with pytest.raises(ConfigError, match="number of seconds"):
                    call()
            assert store.put(numbers(1), keys=keys(0, 1), wait_s=math.inf).stored == 1
            assert store.lease("log", requester="a", lease_s=math.inf, wait_s=math.inf)

    async with serve(tcp=tcp) as options:
        await asyncio.to_thread(run, options)
        async with ZmqDataStore(ZmqOptions(**options)) as store:
            waiting = asyncio.create_task(store.lease("log", requester="b", wait_s=60.0))
            for wait_s in WAITS:
                assert await store.lease("log", requester="a", wait_s=wait_s) is None
            for call in calls(store):
                with pytest.raises(ConfigError, match="number of seconds"):
                    await call()
            await store.put(numbers(1), keys=keys(1, 1))
            assert len((await waiting).rows) == 1  # which none of these has cut off


def calls(store):
    yield lambda: store.lease("log", requester="a", wait_s=math.nan)
    yield lambda: store.lease("log", requester="a", lease_s=math.nan)
    yield lambda: store.renew([], lease_s=math.nan)
    yield lambda: store.put(numbers(1), keys=keys(9, 1), wait_s=math.nan)
    yield lambda: store.stats(wait_s=math.nan)
    yield lambda: store.wait_weights(after=0, wait_s=math.nan)


@pytest.mark.parametrize(
    "wrong",
    [{"limit_rows": 0}, {"limit_tokens": 0}, {"total_rows": -1}, {"prefetch_rows": -1}],
)
async def test_reader_of_a_number_that_makes_no_sense_is_refused(store, wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        store.reader("log", ["x"], requester="a", **wrong)


# Keys

WRONG_KEYS = {
    "source": GroupKey(1 << 16, 0, 0),
    "epoch": GroupKey(0, -1, 0),
    "sequence": GroupKey(0, 0, (1 << 62) + 1),
}


@pytest.mark.parametrize(("part", "key"), WRONG_KEYS.items(), ids=WRONG_KEYS)
async def test_key_out_of_range_is_named(store, part, key):
    await store.register(LOG)
    rows = Batch({"x": Column.dense([1.0, 2.0], np.float32)})
    with pytest.raises(DataError, match=f"the {part} of key {key[0]}/{key[1]}/{key[2]} is "):
        await store.put(rows, keys=[GroupKey(0, 0, 0), key])
    with pytest.raises(DataError, match=f"the {part} of key .* whole number from 0 to"):
        await store.drop([Key(*key, 0)], reason="mistake")
    assert (await store.stats()).rows == 0


# Columns

UNREADABLE = {
    "offsets that fall": Column(np.arange(3.0), np.array([0, 5, 3])),
    "offsets beyond the values": Column(np.arange(3.0), np.array([0, 2, 7])),
    "offsets before the values": Column(np.arange(3.0), np.array([-2, 1, 3])),
    "record": Column(np.zeros(2, [("a", "f4"), ("b", "i4")])),
    "map with a list as a key": Column([{(1, 2): 3}, None]),
    "such a map in a list": Column(["x", [{(): 0}]]),
}


@pytest.mark.parametrize("column", UNREADABLE.values(), ids=UNREADABLE)
async def test_column_that_nobody_could_read_as_it_was_is_refused_at_the_put(store, column):
    await store.register(LOG)
    with pytest.raises(DataError, match="'x'"):
        await store.put(Batch({"x": column}), keys=keys(0, 2))
    assert (await store.stats()).rows == 0


async def test_name_of_a_column_that_no_message_can_hold_is_refused_and_pins_no_memory(store):
    await store.register(LOG)
    await store.put(numbers(1), keys=keys(0, 1))
    lent = store._connection.session._space._now
    with pytest.raises(DataError, match="names"):
        await store.put(Batch({"\udc80": Column.dense([1.0])}), keys=keys(1, 1))
    assert lent.writing == 0


async def test_column_of_a_refused_put_has_no_say_in_the_form_of_later_ones(store):
    await store.register(LOG)
    for wrong in ({"partition": "nobody's"}, {"row_bytes": 1 << 40}):
        with pytest.raises(Exception, match=r"nobody's|capacity|larger"):
            await store.put(numbers(1, np.float64), keys=keys(0, 1), **wrong)
    assert (await store.put(numbers(1), keys=keys(0, 1))).stored == 1


def test_layout_that_names_a_column_twice_is_refused():
    twice = Layout((ColumnLayout("x", "dense", "<f4", ()), ColumnLayout("x", "ragged", "<f4", ())))
    with pytest.raises(DataError, match="twice"):
        Layout.load(twice.dump())


# Numbers of rows


async def test_put_and_commit_of_no_rows_do_nothing(store):
    by_response = TaskSpec("by_response", ("response_ids",), ("behaviour_logprobs",))
    await store.register(by_response)
    ids = Batch({"response_ids": Column.ragged([np.arange(3)], np.int32)})
    empty = Batch({"response_ids": Column.ragged([], np.int32)})
    result = await store.put(empty, keys=[])
    assert (result.stored, result.known) == (0, 0)
    await store.put(ids, keys=keys(0, 1))
    ref = (await store.lease("by_response", requester="a")).ref()
    none = Batch({"behaviour_logprobs": Column.ragged([], np.float32)})
    done = await store.commit(BatchRef(ref.lease_id, ref.fence, ()), writes=none)
    assert (done.committed, done.repeated, done.dropped) == (0, 0, 0)
    assert (await store.stats()).tasks["by_response"].leased == 1


@pytest.mark.parametrize("tcp", [False, True])
async def test_rows_beyond_what_a_header_holds_are_leased_and_read_whole(serve, tcp):
    count, part = 250_000, 125_000
    how = {"capacity_rows": count, "tcp": tcp, "shards": 2}
    async with serve(**how) as options, ZmqDataStore(ZmqOptions(**options)) as store:
        await store.register(LOG)
        for first in range(0, count, part):
            x = Column.dense(np.arange(first, first + part), np.float32)
            await store.put(Batch({"x": x}), keys=keys(first, part))
        lease = await store.lease("log", requester="a")
        assert len(lease.rows) == count
        some = lease.rows[: 6 * 4096 : 3]  # none beside the next
        batch = await store.read(lease.ref(some), ["x"])
        assert batch["x"].array.tolist() == [info.key.sequence for info in some]
        await store.release(lease.ref())


async def test_dropped_groups_beyond_what_a_message_holds_are_told_in_order(serve):
    count = 17_000
    async with serve(capacity_rows=count) as options, ZmqDataStore(ZmqOptions(**options)) as store:
        await store.register(LOG)
        await store.put(numbers(count), keys=keys(0, count))
        gone = [Key(*key, 0) for key in keys(0, count)]
        await store.drop(gone, reason="bad: " + "x" * 1000)
        stats = await store.stats()
        assert [group.serial for group in stats.dropped_groups] == list(range(1, count + 1))
        last = await store.stats(drops_after=count - 2)
        assert [group.group.sequence for group in last.dropped_groups] == [count - 2, count - 1]


async def test_put_that_is_given_up_as_it_waits_gives_back_what_it_was_lent(serve):
    async with serve(capacity_rows=1) as options, ZmqDataStore(ZmqOptions(**options)) as store:
        await store.register(LOG)
        await store.put(numbers(1), keys=keys(0, 1))

        async def waits():
            return (await store.stats()).waiting_puts == 1

        async def waits_no_more():
            return not await waits()

        for _ in range(10):
            store._connection.session._space._next = None  # so that each asks for memory ahead
            put = asyncio.create_task(store.put(numbers(1), keys=keys(1, 1)))
            await eventually(waits)
            put.cancel()
            await eventually(waits_no_more)
        _, slot, _ = await store._connection.call(Call("store.lend", [1000, []]))
        assert slot <= 1 + 4 * LENT_BYTES // UNIT


@pytest.mark.multiproc
async def test_shards_added_at_the_same_time_are_all_there():
    async with ZmqDataStore(ZmqOptions(shards=1)) as store:
        await asyncio.gather(*(store.add_shard() for _ in range(3)))
        assert store.processes.spec.shards == len(set(store.processes.pids)) - 1 == 4
        assert len(store.processes.spec.shard_addresses) == 4
        await store.register(LOG)
        await store.put(numbers(3), keys=keys(0, 3))
        assert len((await store.lease("log", requester="a")).rows) == 3
