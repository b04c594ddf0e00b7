"""A process of a store is killed while it is used: it comes back, no row is lost or repeated."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import string

import numpy as np
import psutil
import pytest

import asyncflow_core as af
from asyncflow_core.batch import Batch, Column, GroupKey, Key
from asyncflow_core.errors import LeaseLostError, PeerLostError
from asyncflow_core.services.data_store import PutResult, TaskSpec
from asyncflow_core.testing.aio import eventually
from asyncflow_core.testing.data_store import prompts
from asyncflow_store_zmq import store as store_module
from asyncflow_store_zmq.options import ZmqOptions
from asyncflow_store_zmq.store import ZmqDataStore

from .test_flow import centred, right_letter

pytestmark = pytest.mark.multiproc

SCORE = TaskSpec("score", ("prompt_ids",), ("reward",))
TRAIN = TaskSpec("train", ("prompt_ids", "reward"))
SAMPLES = 2


def prompt(number):
    return np.arange(number, number + 5, dtype=np.int32)


class Traffic:
    """A producer and two workers, each a client of its own.

    Attributes:
        done: rows by task whose commit was acknowledged.
        unknown: rows whose commit was refused, for its lease ended with the controller; it may have
            been written down before.
    """

    def __init__(self, groups):
        self.groups = groups
        self.produced = False
        self.done = {"score": set(), "train": set()}
        self.unknown = {"score": set(), "train": set()}

    async def produce(self, store, pause):
        for number in range(self.groups):
            ids = Column.ragged([prompt(number)])
            await store.put(
                Batch({"prompt_ids": ids}), keys=[GroupKey(0, 0, number)], samples=SAMPLES
            )
            await pause(number)
        self.produced = True

    async def work(self, store, task):
        while not self.produced or (await store.stats()).rows:
            lease = await store.lease(
                task.name, requester=task.name, limit_rows=8, lease_s=60.0, wait_s=0.2
            )
            if lease is not None:
                await self._use(store, task, lease)

    async def _use(self, store, task, lease):
        keys = {info.key for info in lease.rows}
        again = keys & self.done[task.name]
        assert not again, f"{task.name} got rows again that were acknowledged: {again}"
        try:
            batch = await store.read(lease.ref(), task.reads)
        except LeaseLostError:
            return
        for info, ids in zip(lease.rows, batch["prompt_ids"], strict=True):
            np.testing.assert_array_equal(ids, prompt(info.key.sequence))
        numbers = [float(info.key.sequence) for info in lease.rows]
        writes = None
        if task is SCORE:
            writes = Batch({"reward": Column.dense(numbers, np.float32)})
        else:
            assert batch["reward"].array.tolist() == numbers
        try:
            result = await store.commit(lease.ref(), writes=writes)
        except LeaseLostError:
            self.unknown[task.name] |= keys
            return
        assert result.committed == len(lease.rows)
        self.done[task.name] |= keys

    def check(self):
        every = {Key(0, 0, n, s) for n in range(self.groups) for s in range(SAMPLES)}
        for name in self.done:
            assert self.done[name] | self.unknown[name] == every
            assert len(self.done[name]) > len(every) // 2


async def run(options, victims, *, groups=60, kills=2):
    """Traffic through a store whose processes are killed on the way."""
    traffic = Traffic(groups)
    async with ZmqDataStore(options, name="owner") as owner:
        registrations = [await owner.register(task) for task in (SCORE, TRAIN)]
        attached = ZmqOptions(**owner.attach_options())

        async def pause(number):
            if number and number % (groups // (kills + 1)) == 0:
                pids = owner.processes.pids
                before = [pids[victim] for victim in victims]
                for pid in before:
                    os.kill(pid, signal.SIGKILL)
                await eventually(lambda: not set(before) & set(owner.processes.pids), timeout_s=30)

        async with (
            ZmqDataStore(attached, name="w0") as first,
            ZmqDataStore(attached, name="w1") as second,
        ):
            async with asyncio.timeout(120), asyncio.TaskGroup() as group:
                group.create_task(traffic.produce(owner, pause))
                group.create_task(traffic.work(first, SCORE))
                group.create_task(traffic.work(second, TRAIN))
            stats = await owner.stats()
            assert (stats.rows, stats.rows_dropped) == (0, {})
        traffic.check()
        for registration in registrations:
            await registration.aclose()


@pytest.mark.parametrize("victims", [[-1], [0], [0, -1]], ids=["controller", "shard", "both"])
@pytest.mark.parametrize("bind", ["", "tcp://127.0.0.1:*"], ids=["ipc", "tcp"])
async def test_killed_processes_come_back_and_no_row_is_lost_or_repeated(victims, bind, tmp_path):
    options = ZmqOptions(
        durability="journal", directory=tmp_path / "kept", shards=2, bind=bind, restarts=3
    )
    await run(options, victims)


async def test_killed_shard_of_a_store_that_syncs_its_disk_comes_back(tmp_path):
    options = ZmqOptions(durability="fsync", directory=tmp_path / "kept", shards=1)
    await run(options, [0], groups=20, kills=1)


async def test_killed_controller_without_durability_is_an_error_in_words():
    async with ZmqDataStore(ZmqOptions(shards=1)) as owner:
        await owner.register(SCORE)
        async with ZmqDataStore(ZmqOptions(**owner.attach_options()), name="w") as client:
            waiting = asyncio.create_task(client.lease("score", requester="w", wait_s=60))
            await eventually(lambda: client._connection._clients[0]._calls)
            os.kill(owner.processes.pids[-1], signal.SIGKILL)
            text = r"is gone: its process ended.*without durability held is gone with it"
            with pytest.raises(PeerLostError, match=text):
                await waiting
            with pytest.raises(PeerLostError, match=text):
                await owner.stats()


async def test_killed_shard_without_durability_comes_back_with_its_rows():
    async with ZmqDataStore(ZmqOptions(shards=1)) as owner:
        await owner.register(SCORE)
        await owner.put(Batch({"prompt_ids": Column.ragged([prompt(3)])}), keys=[GroupKey(0, 0, 3)])
        pid = owner.processes.pids[0]
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: owner.processes.pids[0] != pid, timeout_s=30)
        lease = await owner.lease("score", requester="w")
        batch = await owner.read(lease.ref(), ["prompt_ids"])
        np.testing.assert_array_equal(batch["prompt_ids"][0], prompt(3))


async def test_store_that_dies_too_often_is_given_up_in_words(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(store_module, "_RECONNECT_S", 3.0)
    caplog.set_level(logging.WARNING)
    options = ZmqOptions(durability="journal", directory=tmp_path / "kept", shards=1, restarts=1)
    async with ZmqDataStore(options) as owner:
        await owner.register(SCORE)
        pid = owner.processes.pids[-1]
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: owner.processes.pids[-1] != pid, timeout_s=30)
        assert (await owner.stats()).rows == 0
        os.kill(owner.processes.pids[-1], signal.SIGKILL)
        with pytest.raises(PeerLostError, match=r"did not come back within 3 s"):
            await owner.stats()
    assert "is started again, 0 time(s) more at most" in caplog.text
    assert "and is not started again" in caplog.text


def store_processes(role):
    """Of the run in this process."""
    lines = [(child, child.cmdline()) for child in psutil.Process().children()]
    return [child for child, line in lines if "asyncflow_store_zmq.serve" in line and role in line]


def train(tmp_path, role, durability, launcher, weight_sync):
    """A run whose store loses a process after steps 2 and 4; the steps, and what was trained."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": c}) + "\n" for c in "abcdefgh"))
    where = {} if durability == "none" else {"directory": str(tmp_path / "kept")}
    flow = af.Flow(
        name="killed",
        out=str(tmp_path / "runs"),
        tokenizer=af.use("characters", alphabet=string.ascii_lowercase),
        prompts=af.use("jsonl", path=str(prompts)),
        rollout=af.use("tabular", sampling={"max_new_tokens": 1}),
        trainer=af.use("tabular", lr=20.0),
        loss=af.use("tabular_ppo_clip"),
        stages={
            "reward": af.reward(right_letter),
            "advantage": af.stage(
                centred, reads=["reward", "response_ids"], writes=["advantages"], whole_groups=True
            ),
        },
        workflow={"max_staleness": 1, "steps": 8, "groups_per_step": 4, "group_size": 4},
        data_store=af.use("zmq", shards=1, durability=durability, **where),
        launcher=af.use(launcher),
        weight_sync=af.use(weight_sync),
    )
    versions = []
    for step in flow.run():
        versions.append(step.version)
        if step.version in (2, 4):
            for child in store_processes(role):
                os.kill(child.pid, signal.SIGKILL)
    return versions, flow.summary.rows_trained


RUNS = [
    ("inline", "memory"),
    pytest.param("local", "host", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("launcher", "weight_sync"), RUNS)
@pytest.mark.parametrize("role", ["controller", "shard"])
def test_run_goes_on_over_killed_processes_and_trains_every_row_once(
    role, launcher, weight_sync, tmp_path
):
    found = train(tmp_path, role, "journal", launcher, weight_sync)
    assert found == (list(range(1, 9)), 8 * 4 * 4)


@pytest.mark.parametrize(("launcher", "weight_sync"), RUNS)
def test_run_without_durability_ends_with_a_sentence(launcher, weight_sync, tmp_path):
    with pytest.raises(PeerLostError, match=r"is gone.*without durability held is gone with it"):
        train(tmp_path, "controller", "none", launcher, weight_sync)
    assert not store_processes("shard")


async def test_put_whose_answer_was_lost_says_that_it_stored_what_it_finds(serve, monkeypatch):
    async with serve() as options, ZmqDataStore(ZmqOptions(**options, reconnect_s=30.0)) as store:
        await store.register(TaskSpec("log", ("prompt_ids",)))
        first = store._connection
        run = first.run

        async def lose_the_answer(*call):
            await run(*call)
            raise PeerLostError("the controller died")

        monkeypatch.setattr(first, "run", lose_the_answer)
        two = [GroupKey(0, 0, 0), GroupKey(0, 0, 1)]
        assert await store.put(prompts(2), keys=two) == PutResult(2, 0)
        assert await store.put(prompts(2), keys=two) == PutResult(0, 2)
