"""The policy that a worker was given orders what it gets."""

import numpy as np

from asyncflow_core.batch import Batch, Column, GroupKey
from asyncflow_core.flow.working.worker import Part
from asyncflow_core.services.data_store import TaskSpec
from asyncflow_core.testing.aio import eventually

LATER = TaskSpec("later", ("prompt_ids", "response_ids", "versions"))


async def order_under(policy, store, start):
    """The numbers of three groups, whose responses are of versions 2, 0 and 1, as they come."""
    seen = []

    async def work(lease, batch):
        seen.extend(info.key.sequence for info in lease.rows)
        yield Part(lease.rows)

    await store.register(LATER)
    columns = {
        "prompt_ids": Column.ragged([[1]] * 3, np.int32),
        "response_ids": Column.ragged([[2]] * 3, np.int32),
        "versions": Column.ragged([np.array([[v, 1]], np.int32) for v in (2, 0, 1)]),
    }
    keys = [GroupKey(0, 0, number) for number in range(3)]
    await store.put(Batch(columns), keys=keys)
    await start(LATER, work, rows_in_flight=1, rows_per_lease=1, policy=policy)
    await eventually(lambda: len(seen) == 3)
    return seen


async def test_worker_with_fifo_gets_rows_as_they_came(store, start):
    assert await order_under("fifo", store, start) == [0, 1, 2]


async def test_worker_with_stalest_first_gets_the_oldest_versions_first(store, start):
    assert await order_under("stalest_first", store, start) == [1, 2, 0]
