"""Calls that do not return in time, rows that are given up, a worker that comes back."""

import asyncio
import threading

import pytest

from asyncflow_core.errors import ServiceError, ServiceTimeoutError
from asyncflow_core.flow.processes.watchdog import Clock, Restarts
from asyncflow_core.flow.working.calls import ATTEMPTS, CallLog
from asyncflow_core.flow.working.stage_work import stage_work
from asyncflow_core.flow.working.threads import DaemonThread
from asyncflow_core.flow.working.worker import Worker, read_rows
from asyncflow_core.flow.working.workers_here import keep
from asyncflow_core.parts import StageContract
from asyncflow_core.services.data_store import TaskSpec
from asyncflow_core.testing.aio import eventually

REWARD = ("reward", "reward_error")


@pytest.fixture
def thread():
    made = DaemonThread("test")
    yield made
    made.shutdown(wait=False, cancel_futures=True)


@pytest.fixture
def log(tmp_path):
    return CallLog.of(tmp_path, "judge")


def hang(batch):
    threading.Event().wait()


def one(batch):
    return {"reward": [1.0] * batch.rows, "reward_error": [None] * batch.rows}


async def lease_of(store, put, rows, writes=REWARD, **more):
    task = TaskSpec("s", ("prompt_ids",), writes, **more)
    await store.register(task)
    await put(rows)
    lease = await store.lease("s", requester="judge-0")
    return lease, await read_rows(store, lease, task.reads)


async def parts(work, lease, batch):
    return [part async for part in work(lease, batch)]


async def test_call_over_its_time_on_a_thread_of_the_run_says_what_to_do(store, put, thread):
    lease, batch = await lease_of(store, put, 3)
    contract = StageContract(("prompt_ids",), REWARD)
    work = stage_work(hang, contract, "judge-0", thread, timeout_s=0.05)
    with pytest.raises(
        ServiceTimeoutError, match=r"a call of 3 rows within its timeout_s, 0\.05 s"
    ) as e:
        await parts(work, lease, batch)
    assert "module:name" in str(e.value)


async def test_rows_of_a_call_that_hung_are_called_alone_then_given_up(store, put, thread, log):
    lease, batch = await lease_of(store, put, 3)
    contract = StageContract(("prompt_ids",), REWARD)
    for _ in range(ATTEMPTS):  # of the whole call, then of the first row alone
        lost = DaemonThread("lost")
        work = stage_work(hang, contract, "judge-0", lost, timeout_s=0.05, calls=log)
        with pytest.raises(ServiceTimeoutError, match="its process ends"):
            await parts(work, lease, batch)
        assert log.hung("judge-0")
        lost.shutdown(wait=False)
    work = stage_work(one, contract, "judge-0", thread, timeout_s=5.0, calls=log)
    found = await parts(work, lease, batch)
    assert [len(part.rows) for part in found] == [1, 1, 1]
    assert [part.writes["reward"].array.tolist() for part in found] == [[0.0], [1.0], [1.0]]
    assert "2 times" in next(iter(found[0].writes["reward_error"]))
    assert not log.hung("judge-0")


async def test_rows_of_another_stage_are_dropped(store, put, thread, log):
    lease, batch = await lease_of(store, put, 2, ("score",))
    for _ in range(ATTEMPTS):
        log.begin("judge-0", lease.rows[:1])
        log.hung("judge-0")
    contract = StageContract(("prompt_ids",), ("score",))
    work = stage_work(lambda b: {"score": [1] * b.rows}, contract, "judge-0", thread, calls=log)
    scored, dropped = await parts(work, lease, batch)
    assert (scored.rows[0], dropped.rows[0]) == (lease.rows[1], lease.rows[0])
    assert dropped.drop.startswith("stage did not return: ")


async def test_worker_whose_stage_raises_works_again_as_often_as_it_may(store, put, thread, caplog):
    task = TaskSpec("s", ("prompt_ids",), REWARD)
    calls = []

    def stage(batch):
        calls.append(batch)
        if len(calls) in fails:
            raise OSError("the judge is away")
        return one(batch)

    contract = StageContract(task.reads, task.writes)
    worker = Worker(
        store, task, stage_work(stage, contract, "judge-0", thread), requester="judge-0",
        rows_in_flight=4,
    )  # fmt: skip
    fails = {1, 2}
    restarts = Restarts(2, 600.0)
    running = asyncio.create_task(keep(worker, restarts, Clock()))
    await eventually(lambda: "s" in store._ready)
    await put(3)

    async def done():
        return (await store.stats()).tasks["s"].committed == 3

    await eventually(done)
    assert "stage 'judge-0' failed: OSError: the judge is away" in caplog.text
    fails = {len(calls) + 1}
    await put(1, first=3)
    with pytest.raises(ServiceError, match="the judge is away"):
        await asyncio.wait_for(running, 10)
    assert restarts.count == {"judge-0": 2}
