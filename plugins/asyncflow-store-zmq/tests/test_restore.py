"""Going back to a version: what later versions did is void; what is left is handed out again."""

from __future__ import annotations

import numpy as np
import pytest

from asyncflow_core.batch import Batch, Column, GroupKey
from asyncflow_core.errors import DataError
from asyncflow_core.services.data_store import Order, SupportsDurability, TaskSpec
from asyncflow_store_zmq.options import ZmqOptions
from asyncflow_store_zmq.store import ZmqDataStore

pytestmark = pytest.mark.multiproc

GENERATE = TaskSpec("generate", ("prompt_ids",), ("response_ids",), order=Order.ADMITTED)
SCORE = TaskSpec("score", ("response_ids",), ("reward",))
RANK = TaskSpec("rank", ("reward",), ("advantages",), whole_groups=True)
RECORD = TaskSpec("record", ("reward",))
TRAIN = TaskSpec("train", ("response_ids", "advantages"), whole_groups=True, order=Order.STEP)
TASKS = (GENERATE, SCORE, RANK, RECORD, TRAIN)


def opened(tmp_path):
    options = ZmqOptions(durability="journal", directory=tmp_path / "store", max_staleness=9)
    return ZmqDataStore(options)


async def put(store, batch, groups=1, samples=2):
    keys = [GroupKey(0, batch, n) for n in range(groups)]
    ids = Column.ragged([[n, n] for n in range(groups)], np.int32)
    await store.put(Batch({"prompt_ids": ids}), keys=keys, samples=samples, batch=batch)


async def work(store, task, *, version=None, rows=None, made=None):
    """Lease all that is ready, or so many rows, and commit it; the keys."""
    lease = await store.lease(
        task.name, requester="w", version=version, limit_rows=rows, wait_s=0.05
    )
    if lease is None:
        return []
    columns = {
        "generate": lambda n: {"response_ids": Column.ragged([[7, 7, 7]] * n, np.int32)},
        "score": lambda n: {"reward": Column.dense([1.0] * n, np.float32)},
        "rank": lambda n: {"advantages": Column.ragged([[0.5] * 3] * n, np.float32)},
    }.get(task.name)
    writes = None if columns is None else Batch(columns(len(lease.rows)))
    await store.commit(lease.ref(), writes=writes, version=made)
    return [tuple(info.key) for info in lease.rows]


async def test_restore_lets_void_rows_be_generated_again_and_keeps_the_others(tmp_path):
    async with opened(tmp_path) as store:
        assert isinstance(store, SupportsDurability)
        for task in TASKS:
            await store.register(task)
        for batch in (0, 1, 2, 3):
            await put(store, batch)
        await work(store, GENERATE, version=9, rows=5, made=1)  # batches 0, 1 and a row of 2
        await work(store, GENERATE, version=9, rows=2, made=3)  # the other row of 2, a row of 3
        for task in (SCORE, RANK, RECORD):
            await work(store, task)
        await work(store, TRAIN, version=0, made=1)
        await work(store, TRAIN, version=1, made=2)
        await work(store, TRAIN, version=2, made=3)
        await store.checkpoint(1)
    async with opened(tmp_path) as store:  # killed after step 3, resumed from step 1
        for task in TASKS:
            await store.register(task)
        assert await store.restore(1) == 4
        stats = await store.stats()
        assert stats.rows == 6
        # The rows of versions after the checkpoint, and the one that never had a response.
        assert await work(store, SCORE) == []
        again = await work(store, GENERATE, version=9, made=1)
        assert again == [(0, 2, 0, 1), (0, 3, 0, 0), (0, 3, 0, 1)]
        assert sorted(await work(store, SCORE)) == again
        # A row that was kept is recorded and ranked again: its file lines are void, its group
        # has other rows now.
        recorded = [(0, b, 0, s) for b in (1, 2, 3) for s in (0, 1)]
        assert sorted(await work(store, RECORD)) == recorded
        assert sorted(await work(store, RANK)) == [(0, b, 0, s) for b in (2, 3) for s in (0, 1)]
        for batch in (1, 2, 3):
            trained = await work(store, TRAIN, version=batch, made=batch + 1)
            assert trained == [(0, batch, 0, 0), (0, batch, 0, 1)]
        assert (await store.stats()).rows == 0


async def test_restore_drops_rows_outside_batches_and_survives_its_own_repetition(tmp_path):
    everything = ("train", "eval")
    generate = TaskSpec(
        "generate", ("prompt_ids",), ("response_ids",), partitions=everything, order=Order.ADMITTED
    )
    async with opened(tmp_path) as store:
        await store.register(generate)
        await store.register(TRAIN)
        ids = Column.ragged([[1]], np.int32)
        await store.put(Batch({"prompt_ids": ids}), keys=[GroupKey(1, 0, 0)], partition="eval")
        await put(store, 0)
    for _ in range(2):
        async with opened(tmp_path) as store:
            await store.restore(0)
            stats = await store.stats()
            assert stats.rows == 2
            assert stats.rows_dropped == {"void": 1}


async def test_restore_of_what_a_checkpoint_covers_is_refused_and_clear_forgets(tmp_path):
    async with opened(tmp_path) as store:
        await store.register(TRAIN)
        await put(store, 0)
        await store.checkpoint(5)
        with pytest.raises(DataError, match="the model was saved at version 5, so what trained"):
            await store.restore(4)
        await store.clear()
        assert (await store.stats()).rows == 0
        assert await store.restore(0) == 0
        await store.register(TRAIN)
        await put(store, 0)
        assert (await store.stats()).rows == 2
        first = await store.lease("train", requester="w", version=0, wait_s=0.05)
        assert first is None  # no advantages yet
    async with opened(tmp_path) as store:
        assert (await store.stats()).rows == 2
