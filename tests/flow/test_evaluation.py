"""Evaluation beside training: within its share, ahead of training rows, and nobody waits for it."""

import asyncio
import contextlib

import numpy as np
import pytest

from asyncflow_core.batch import Batch, Column
from asyncflow_core.config import RunConfig
from asyncflow_core.flow.running.evaluation import Evaluations, rows_at_a_time
from asyncflow_core.flow.running.record import Recorder
from asyncflow_core.flow.running.supply import Supply
from asyncflow_core.flow.running.totals import Totals
from asyncflow_core.flow.working.threads import DaemonThread
from asyncflow_core.flow.working.work import observer_work
from asyncflow_core.flow.working.worker import Worker
from asyncflow_core.parts import PromptRecord
from asyncflow_core.services.data_store import Order, TaskSpec
from asyncflow_core.testing.aio import eventually

BOTH = ("train", "eval")
GENERATE = TaskSpec(
    "rollout",
    ("prompt_ids",),
    ("response_ids", "reward", "versions", "finish_reason"),
    partitions=BOTH,
    order=Order.ADMITTED,
)
RECORD = TaskSpec("record", ("prompt_ids", *GENERATE.writes), partitions=BOTH)
TRAIN = TaskSpec("train", ("reward",), whole_groups=True, order=Order.STEP)


class Prompts:
    fields = ()

    def train(self, epoch):
        return (PromptRecord([n], {}) for n in range(100))

    def evaluation(self):
        return (PromptRecord([n], {}) for n in range(20))


class Served:
    """What replicas serve; settled when told."""

    def __init__(self):
        self.event = asyncio.Event()

    async def settled(self):
        await self.event.wait()


def config(**evaluation):
    part = {"plugin": "any"}
    return RunConfig(
        **dict.fromkeys(("prompts", "trainer", "loss"), part),
        rollout={**part, "replicas": 2, "rows_in_flight": 20},
        stages={},
        workflow={"steps": 10, "groups_per_step": 2, "group_size": 2, "max_staleness": 1},
        evaluation={"samples": 2, "every": 2, "share": 0.1, **evaluation},
    )


def answer(rows, version=3):
    count = len(rows)
    return Batch(
        {
            "response_ids": Column.ragged([[1, 2]] * count, np.int32),
            "reward": Column.dense([float(i.key.sequence % 4 == 0) for i in rows], np.float32),
            "versions": Column.ragged([np.array([[version, 2]], np.int32)] * count, np.int32),
            "finish_reason": Column.objects(["stop"] * count),
        }
    )


class Written:
    def append(self, name, records):
        pass


class Run:
    """A store, its recorder, and evaluations; rollout is done by the test."""

    def __init__(self, store, config):
        self.store, self.config = store, config
        self.records, self.served, self.totals = [], Served(), Totals()

    async def start(self, stack, group):
        thread = DaemonThread("t")
        stack.callback(thread.shutdown)
        recorder = Recorder(Written(), None, thread)
        worker = Worker(
            self.store,
            RECORD,
            observer_work(recorder.observe),
            requester="recorder",
            rows_in_flight=64,
        )
        await self.store.register(GENERATE)
        await self.store.register(TRAIN)
        await worker.register()
        self.recording = asyncio.create_task(worker.run())
        stack.callback(self.recording.cancel)
        self.supply = Supply(self.store, Prompts(), self.config, thread)
        self.evaluations = Evaluations(
            self.config,
            self.store,
            self.supply,
            recorder,
            self.served,
            self.totals,
            self.records.append,
        )
        self.group = group

    async def held_out(self):
        return (await self.store.stats()).rows_by_partition.get("eval", 0)

    async def generate(self, *, limit=3, drop=False):
        lease = await self.store.lease(
            "rollout", requester="r", version=3, limit_rows=limit, wait_s=1.0
        )
        if lease is None:
            return []
        if drop:
            await self.store.drop([info.key for info in lease.rows], reason="too long")
        else:
            await self.store.commit(lease.ref(), writes=answer(lease.rows))
        return lease.rows


@pytest.fixture
async def start(store):
    async with contextlib.AsyncExitStack() as stack:
        group = await stack.enter_async_context(asyncio.TaskGroup())

        async def call(config):
            run = Run(store, config)
            await run.start(stack, group)
            return run

        yield call


def test_rows_at_a_time_is_the_share_or_one_prompt():
    for share, rows in ((0.1, 4), (1.0, 40), (0.01, 2)):
        made = config(share=share)
        assert rows_at_a_time(made, made.evaluation) == rows


async def test_beside_training_never_more_than_the_share_and_never_before_it_serves(start):
    run = await start(config())
    run.evaluations.begin(3, run.group)
    run.evaluations.begin(2, run.group)
    await asyncio.sleep(0.05)
    assert await run.held_out() == 0  # not every replica serves version 2 yet
    run.served.event.set()
    seen = 0
    while seen < 40:
        assert await run.held_out() <= 4
        seen += len(await run.generate())
    await eventually(lambda: run.records)
    [record] = run.records
    assert record["eval/version"] == 2
    assert (record["eval/rows"], record["eval/rows_dropped"]) == (40, 0)
    assert (record["eval/oldest_version"], record["eval/newest_version"]) == (3, 3)
    assert run.totals.scores == {2: 0.25}
    assert run.totals.tokens_evaluated == 80
    news = run.evaluations.news()
    assert news["eval/score"] == 0.25
    assert run.evaluations.news() == {}


async def test_held_out_rows_come_before_training_rows_and_the_trainer_never_sees_them(start):
    run = await start(config())
    run.served.event.set()
    admitting = asyncio.create_task(run.supply.run())
    await eventually(lambda: run.supply.rows_put == 8)
    run.evaluations.begin(2, run.group)
    order = []
    while len(order) < 48:
        order += [info.batch for info in await run.generate(limit=4)]
    admitting.cancel()
    # Training rows only while the next held-out ones were on their way.
    assert order.count(None) == 40
    lease = await run.store.lease("train", requester="t", version=0)
    assert {info.batch for info in lease.rows} == {0}
    stats = await run.store.stats()
    assert stats.tasks["train"].ready + stats.tasks["train"].leased == 8
    await eventually(lambda: run.records)


async def test_dropped_rows_are_subtracted_whole_groups_and_single_rows(start):
    run = await start(config())
    run.served.event.set()
    run.evaluations.begin(2, run.group)
    dropped = answered = 0
    while dropped + answered < 40:
        rows = len(await run.generate(limit=3, drop=dropped < 9))
        if dropped < 9:
            dropped += rows
        else:
            answered += rows
    await eventually(lambda: run.records)
    [record] = run.records
    assert record["eval/rows_dropped"] == dropped >= 9
    assert record["eval/rows"] == answered


async def test_evaluation_that_is_not_over_is_not_doubled(start, caplog):
    run = await start(config())
    run.evaluations.begin(2, run.group)
    run.evaluations.begin(4, run.group)
    assert run.evaluations.skipped == 1
    assert "version 4 is not evaluated" in caplog.text
    run.served.event.set()
    seen = 0
    while seen < 40:
        seen += len(await run.generate())
    await eventually(lambda: run.records)
    run.evaluations.begin(6, run.group)
    while seen < 80:
        seen += len(await run.generate())
    await eventually(lambda: len(run.records) == 2)
    assert list(run.totals.scores) == [2, 6]


async def test_alone_puts_all_at_once_and_waits_for_the_one_beside_training(start):
    run = await start(config())
    run.served.event.set()
    run.evaluations.begin(8, run.group)
    run.evaluations.begin(10, run.group)  # the one after training is of this version
    alone = asyncio.create_task(run.evaluations.alone(10))
    seen = most = 0
    while seen < 80:
        seen += len(await run.generate())
        most = max(most, await run.held_out())
    await alone
    assert most > 30
    assert list(run.totals.scores) == [8, 10]


async def test_without_prompts_or_section_there_is_no_score(start, monkeypatch):
    monkeypatch.setattr(Prompts, "evaluation", lambda self: iter(()))
    run = await start(config())
    await run.evaluations.alone(0)
    assert (run.totals.scores, run.records) == ({}, [])
