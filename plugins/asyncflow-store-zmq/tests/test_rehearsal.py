"""A controller rehearses while rows come slowly to who waits, and at no other time."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import numpy as np
import pytest

from asyncflow_core.batch import Batch, Column, GroupKey
from asyncflow_core.errors import DataError
from asyncflow_core.services.data_store import TaskSpec
from asyncflow_core.testing.aio import eventually
from asyncflow_store_zmq import rehearsal as module
from asyncflow_store_zmq.controller import Controller
from asyncflow_store_zmq.options import ZmqOptions
from asyncflow_store_zmq.rehearsal import NoMemory, Rehearsal
from asyncflow_store_zmq.spec import StoreSpec
from asyncflow_store_zmq.store import ZmqDataStore

from .conftest import TOKEN


@pytest.fixture
def spec(tmp_path):
    where = str(tmp_path)
    address = f"ipc://{where}/c"
    return StoreSpec(where, where, address, TOKEN, 1, "none", 64, 1 << 30, 0, 5.0, remember_rows=1)


@pytest.fixture
async def play(spec):
    """A rehearsal whose store is told what it sees: `now`, and hand-outs that are `waiting`."""
    play = SimpleNamespace(now=0.0, made=[], handouts=SimpleNamespace(waiting=True))

    def understudy():
        controller = Controller(spec, time.monotonic, NoMemory(spec))
        controller._table.pool.add_shard()
        play.made.append(controller)
        return controller

    play.rehearsal = Rehearsal(understudy, play.handouts, lambda: play.now)
    yield play
    await play.rehearsal.aclose()


async def rows(play, count):
    """So many further rows are rehearsed."""
    before = play.rehearsal.times
    await eventually(lambda: play.rehearsal.times >= before + count)


async def over(play):
    """What was seen last is long ago."""

    def later():
        play.now += 1.0
        return play.rehearsal._timer is None

    await eventually(later)


async def test_begins_with_rows_that_were_waited_for_and_ends_a_second_after_the_last(play):
    play.rehearsal.came()
    await rows(play, 3)
    play.now = 0.9
    play.rehearsal.came()
    await rows(play, 3)
    play.now = 1.8
    await rows(play, 3)
    play.now = 1.95
    await eventually(lambda: play.rehearsal._timer is None)
    play.rehearsal.came()
    await rows(play, 3)
    assert len(play.made) == 1


async def test_nothing_is_rehearsed_while_nobody_waits(play):
    play.handouts.waiting = False
    play.rehearsal.came()
    await over(play)
    assert (play.rehearsal.times, play.made) == (0, [])


async def test_nothing_is_rehearsed_while_rows_come_fast(play, monkeypatch):
    looks = 0

    def clock():
        nonlocal looks
        looks += 1
        busy.came()  # between any two looks
        return play.now

    busy = Rehearsal(lambda: pytest.fail("made an understudy"), play.handouts, clock)
    busy.came()
    await eventually(lambda: looks > 20)
    assert busy.times == 0
    await busy.aclose()


async def test_what_is_rehearsed_leaves_nothing_behind(play, monkeypatch):
    monkeypatch.setattr(module, "_ROW_BYTES", 1 << 20)  # a few fill what is lent at a time
    monkeypatch.setattr(module, "_EVERY_S", 0.0)
    play.rehearsal.came()
    await rows(play, 50)
    table = play.made[0]._table
    tops = list(table.pool._tops)
    await rows(play, 300)
    assert table.ledger.stats(drops_after=0).rows <= 2
    assert len(table.pool._lent) <= 2
    assert table.pool._tops == tops
    assert len(list(table.payload.segments())) <= 2
    assert not table.pool.holes


async def test_understudy_that_refuses_is_said_and_the_store_goes_on(play, monkeypatch, caplog):
    def refuse(*_):
        raise DataError("not today")

    monkeypatch.setattr(Controller, "put", refuse)
    play.rehearsal.came()
    await eventually(lambda: "rehearses no more" in caplog.text)
    assert "not today" in caplog.text
    play.rehearsal.came()
    assert play.rehearsal._timer is None


async def test_store_whose_rows_come_slowly_rehearses_beside_them(serve, monkeypatch):
    begun = []
    monkeypatch.setattr(Rehearsal, "_rehearse", _counted(Rehearsal._rehearse, begun))
    async with serve() as options, ZmqDataStore(ZmqOptions(**options)) as store:
        await store.register(TaskSpec("train", ("x",)))
        number = 0
        while not begun or begun[0].times < 20:
            waiting = asyncio.create_task(store.lease("train", requester="r", wait_s=30.0))
            await asyncio.sleep(0.02)
            row = Batch({"x": Column.dense([float(number)], np.float32)})
            await store.put(row, keys=[GroupKey(0, 0, number)])
            lease = await waiting
            assert (await store.read(lease.ref(), ["x"]))["x"].array.tolist() == [number]
            await store.commit(lease.ref())
            number += 1
        stats = await store.stats()
    assert set(stats.tasks) == {"train"}
    assert (stats.rows, stats.rows_put) == (0, number)


def _counted(rehearse, begun):
    def counted(self):
        if self not in begun:
            begun.append(self)
        rehearse(self)

    return counted
