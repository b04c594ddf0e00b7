"""Real processes killed at random: nothing acknowledged is lost, nothing is done twice.

Every episode runs producers and workers against a durable store, kills some of its processes, and
starts it again in the same directory, with another number of shards. `make test-store` runs it.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from asyncflow_core.batch import Batch, Column, GroupKey
from asyncflow_core.errors import AsyncFlowError, LeaseLostError
from asyncflow_core.services.data_store import Order, TaskSpec
from asyncflow_store_zmq.options import ZmqOptions
from asyncflow_store_zmq.store import ZmqDataStore

pytestmark = [pytest.mark.slow, pytest.mark.multiproc]

KILLS = int(os.environ.get("ASYNCFLOW_KILLS", "35"))
"""Of each of the six runs."""
SAMPLES = 2
GENERATE = TaskSpec("generate", ("prompt_ids",), ("response_ids",), order=Order.ADMITTED)
SCORE = TaskSpec("score", ("response_ids",), ("reward",))
TRAIN = TaskSpec("train", ("response_ids", "reward"), order=Order.STEP, whole_groups=True)
TASKS = (GENERATE, SCORE, TRAIN)


def prompt(key):
    return np.arange(key.sequence, key.sequence + 5, dtype=np.int32)


def response(key):
    start = key.sequence * 7 + key.sample
    return np.arange(start, start + 40, dtype=np.int32)


def reward(key):
    return float(key.sequence % 97 + key.sample)


class Model:
    """What was attempted, and what was acknowledged."""

    def __init__(self):
        self.next = 0
        self.put = set()
        self.acknowledged = {task.name: set() for task in TASKS}
        self.attempted = {task.name: set() for task in TASKS}
        self.kills = 0

    def check(self, task, batch, infos):
        """What is handed out was not done before, and is what was written."""
        again = self.acknowledged[task.name] & {info.key for info in infos}
        assert not again, f"{task.name} gets acknowledged rows again: {again}"
        for position, info in enumerate(infos):
            if "prompt_ids" in batch:
                np.testing.assert_array_equal(batch["prompt_ids"][position], prompt(info.key))
            if "response_ids" in batch:
                np.testing.assert_array_equal(batch["response_ids"][position], response(info.key))
            if "reward" in batch:
                assert batch["reward"][position] == reward(info.key)


async def produce(store, model):
    while True:
        count = random.randint(1, 6)
        keys = [GroupKey(0, 0, model.next + i) for i in range(count)]
        model.next += count  # a put that fails is repeated after the restart
        model.put.update(keys)
        await put(store, keys)
        await asyncio.sleep(0)


async def put(store, keys):
    ids = Column.ragged([prompt(key) for key in keys])
    await store.put(Batch({"prompt_ids": ids}), keys=keys, samples=SAMPLES, batch=0)


def writes_of(task, infos):
    if task is GENERATE:
        return Batch({"response_ids": Column.ragged([response(info.key) for info in infos])})
    if task is SCORE:
        return Batch({"reward": Column.dense([reward(info.key) for info in infos], np.float32)})
    return None


async def work(store, model, task, *, drain=False):
    version = None if task.order is Order.ANY else 0
    while True:
        lease = await store.lease(
            task.name, requester="w", version=version, limit_rows=8, wait_s=0.2
        )
        if lease is None:
            if drain:
                return
            continue
        batch = await store.read(lease.ref(), task.reads)
        model.check(task, batch, lease.rows)
        half = lease.rows[: max(1, len(lease.rows) // 2)]
        for part in (half, lease.rows[len(half) :]):
            if not part:
                continue
            keys = {info.key for info in part}
            model.attempted[task.name] |= keys
            await store.commit(
                lease.ref(part),
                writes=writes_of(task, part),
                version=1 if task is TRAIN else None,
            )
            model.acknowledged[task.name] |= keys


def kill(model, store, frozen):
    """Some processes, sometimes with a message on its way to a controller that stands still."""
    *shards, controller = store.processes.pids
    victims = random.choice([[controller], [*shards, controller], [*shards, controller], shards])
    if frozen:
        victims = [*shards, controller]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    model.kills += len(victims)


async def episode(directory, model, number):
    options = ZmqOptions(
        durability="journal",
        directory=directory,
        shards=1 + number % 3,
        capacity_rows=512,
        restarts=0,
    )
    store = ZmqDataStore(options)
    await store.open()
    running = []
    try:
        for task in TASKS:
            await store.register(task)
        running = [asyncio.create_task(work(store, model, task)) for task in TASKS]
        missing = sorted(model.put)[-12:]  # those that were under way are among them
        if missing:
            await put(store, missing)
        running.append(asyncio.create_task(produce(store, model)))
        await asyncio.sleep(random.uniform(0.02, 0.25))
        frozen = number % 4 == 0
        if frozen:  # columns are written, the record is not: the message waits in a socket
            os.kill(store.processes.pids[-1], signal.SIGSTOP)
            await asyncio.sleep(0.01)
        kill(model, store, frozen)
        await asyncio.sleep(0.01)
    finally:
        for task in running:
            task.cancel()
        results = await asyncio.gather(*running, return_exceptions=True)
        await store.aclose()
    for result in results:
        if isinstance(result, BaseException) and not isinstance(
            result, AsyncFlowError | asyncio.CancelledError
        ):
            raise result


@pytest.mark.parametrize("seed", range(6))
async def test_store_killed_at_random_keeps_every_row_and_repeats_nothing(tmp_path, seed):
    random.seed(seed)
    model, number, start = Model(), 0, time.monotonic()
    while model.kills < KILLS:
        await episode(tmp_path, model, number)
        number += 1
    options = ZmqOptions(
        durability="journal", directory=tmp_path, capacity_rows=1 << 20, restarts=0
    )
    async with ZmqDataStore(options) as store:
        for task in TASKS:
            await store.register(task)
        keys = sorted(model.put)
        for first in range(0, len(keys), 256):
            await put(store, keys[first : first + 256])
        for task in TASKS:
            await work(store, model, task, drain=True)
        stats = await store.stats()
    assert (stats.rows, stats.reserved_rows, stats.dropped_groups) == (0, 0, ())
    rows = {(*key, sample) for key in keys for sample in range(SAMPLES)}
    for task in TASKS:
        done = {tuple(key) for key in model.attempted[task.name]}
        assert done == rows, f"{task.name}: {len(rows - done)} rows were never handed out"
    seconds = time.monotonic() - start
    sys.stdout.write(
        f"\n{model.kills} kills in {number} episodes, {len(keys)} groups, {seconds:.0f} s\n"
    )


CONSUMER = """
import sys
from asyncflow_store_zmq.blocking import BlockingStore
address, token = sys.argv[1:]
with BlockingStore(address, token=token) as store:
    lease = store.lease("score", requester="sleeper", lease_s=0.3, wait_s=10.0)
    print(lease.lease_id, flush=True)
    sys.stdin.readline()
    try:
        store.commit(lease.ref())
    except Exception as error:
        print(type(error).__name__, flush=True)
    else:
        print("committed", flush=True)
"""


async def test_consumer_stopped_past_its_lease_writes_nothing_when_it_wakes():
    spec = TaskSpec("score", ("prompt_ids",))
    async with ZmqDataStore(ZmqOptions(shards=1)) as store:
        await store.register(spec)
        for number in range(5):
            await put(store, [GroupKey(0, number, 0)])
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-c", CONSUMER, *store.attach_options().values(),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            assert await child.stdout.readline()
            child.send_signal(signal.SIGSTOP)
            child.stdin.write(b"\n")
            lease = await store.lease("score", requester="other", wait_s=10.0)
            assert lease is not None
            await store.commit(lease.ref())
            child.send_signal(signal.SIGCONT)
            assert (await child.stdout.readline()).decode().strip() == LeaseLostError.__name__
            await child.wait()
        stats = await store.stats()
    assert (stats.rows, stats.tasks["score"].committed) == (0, 5 * SAMPLES)
    assert stats.tasks["score"].expired == 5


def test_directory_of_a_living_store_is_refused(tmp_path):
    from asyncflow_core.errors import ConfigError
    from asyncflow_store_zmq.files import StoreDirectory

    first = StoreDirectory(None, tmp_path, durable=True)
    with pytest.raises(ConfigError, match="another data store"):
        StoreDirectory(None, tmp_path, durable=True)
    first.close()
    assert Path(tmp_path).exists()
