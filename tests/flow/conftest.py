"""An in-process store with a clock of its own, rows in it, and workers on it."""

import asyncio
import contextlib

import numpy as np
import pytest

from asyncflow_core.batch import Batch, Column, GroupKey
from asyncflow_core.flow.working.worker import Worker
from asyncflow_core.reference.data_store import InProcessDataStore


class Clock:
    """Seconds that pass when told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
async def store(clock):
    # The store takes no jump of this clock for a stopped process.
    async with InProcessDataStore(clock=clock, max_gap_s=1e9, max_staleness=1) as made:
        yield made


@pytest.fixture
def put(store):
    """Put prompt groups whose prompt is their number."""

    async def call(groups, *, samples=1, batch=None, partition="train", first=0):
        numbers = range(first, first + groups)
        columns = {"prompt_ids": Column.ragged([[n % 7] for n in numbers], np.int32)}
        keys = [GroupKey(0, 0, n) for n in numbers]
        await store.put(
            Batch(columns), keys=keys, samples=samples, batch=batch, partition=partition
        )
        return keys

    return call


@pytest.fixture
async def start(store):
    """Start workers; all are cancelled at the end of the test, none may have failed unseen."""
    running = []

    async def call(task, work, *, requester="w", rows_in_flight=8, **more):
        worker = Worker(
            store, task, work, requester=requester, rows_in_flight=rows_in_flight, **more
        )
        await worker.register()
        worker.running = asyncio.create_task(worker.run())
        running.append(worker.running)
        return worker

    yield call
    for task in running:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            if not task.done():
                await task
