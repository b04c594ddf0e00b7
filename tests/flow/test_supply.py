"""Prompts into the store, batch by batch."""

import asyncio
import contextlib
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from asyncflow_core.batch import GroupKey, Key
from asyncflow_core.config import RunConfig
from asyncflow_core.errors import ConfigError, DataError, ServiceError
from asyncflow_core.flow.running.assigned import TRAINING, Assigned, groups_record
from asyncflow_core.flow.running.policies.over_sampling import STRAGGLER
from asyncflow_core.flow.running.supply import EVALUATION, Supply
from asyncflow_core.flow.working.threads import DaemonThread
from asyncflow_core.parts import PromptRecord
from asyncflow_core.reference.data_store import InProcessDataStore
from asyncflow_core.services.data_store import TaskSpec
from asyncflow_core.testing.aio import eventually

SEE = TaskSpec("see", ("prompt_ids", "answer"), partitions=("train", "eval"))


class Prompts:
    """Three prompts an epoch, two held out."""

    fields = ("answer",)

    def __init__(self, count=3, length=1):
        self.count, self.length = count, length

    def train(self, epoch):
        return (
            PromptRecord([n] * self.length, {"answer": f"{epoch}/{n}"}) for n in range(self.count)
        )

    def evaluation(self):
        return (PromptRecord([9], {"answer": f"held out {n}"}) for n in range(2))


def config(**workflow):
    flow = {"steps": 3, "groups_per_step": 2, "group_size": 2, "max_staleness": 0, **workflow}
    part = {"plugin": "any"}
    return RunConfig(
        **dict.fromkeys(("prompts", "rollout", "trainer", "loss"), part), stages={}, workflow=flow
    )


@contextlib.asynccontextmanager
async def supplying(store, prompts, config, assigned=None, note=None):
    thread = DaemonThread("prompts")
    supply = Supply(store, prompts, config, thread, assigned=assigned, note=note)
    tasks = []

    def start():
        supply.running = asyncio.create_task(supply.run())
        tasks.append(supply.running)

    supply.start = start
    if assigned is None:
        start()
    try:
        yield supply
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        thread.shutdown(cancel_futures=True)


def earlier_life():
    """Two groups of batch 0, and what says that an earlier life of the run assigned them to it."""
    kept = [GroupKey(TRAINING, 0, 0), GroupKey(TRAINING, 0, 1)]
    assigned = Assigned()
    assigned.apply(groups_record(0, kept, (0, 2), ""))
    return kept, assigned


async def waiting(store, rows):
    return (await store.stats()).tasks["see"].ready == rows


async def test_supply_admits_batches_as_versions_complete_over_epochs(store):
    await store.register(SEE)
    seen = []
    async with supplying(store, Prompts(), config()) as supply:
        for version in range(1, 4):
            await eventually(lambda: waiting(store, 4))
            lease = await store.lease("see", requester="t")
            seen += [(info.batch, info.key.group) for info in lease.rows]
            await store.commit(lease.ref())
            supply.advance(version)
        await asyncio.sleep(0)
        assert supply.rows_put == 12
    groups = list(dict.fromkeys(seen))
    assert groups == [
        *((0, (TRAINING, 0, 0)), (0, (TRAINING, 0, 1)), (1, (TRAINING, 0, 2))),
        *((1, (TRAINING, 1, 0)), (2, (TRAINING, 1, 1)), (2, (TRAINING, 1, 2))),
    ]


async def test_supply_dropped_group_is_replaced_in_its_batch_by_the_next_prompt(store):
    await store.register(SEE)
    async with supplying(store, Prompts(), config()):
        await eventually(lambda: waiting(store, 4))
        lease = await store.lease("see", requester="t", limit_rows=2)
        await store.drop([info.key for info in lease.rows], reason="too long")
        await eventually(lambda: waiting(store, 4))
        lease = await store.lease("see", requester="t")
        assert {(info.batch, info.key.sequence) for info in lease.rows} == {(0, 1), (0, 2)}


class SlowStore(InProcessDataStore):
    """The second put waits."""

    gate = None
    puts = 0

    async def put(self, *args, **more):
        self.puts += 1
        if self.puts == 2:
            await self.gate.wait()
        return await super().put(*args, **more)


async def test_stragglers_still_on_their_way_when_their_batch_is_trained_are_dropped():
    """A resumed batch is whole by what the store kept, before its new groups are there."""
    run = config(max_staleness=None, preset="async", extra_groups=1, steps=2)
    async with SlowStore(max_staleness=1) as store:
        store.gate = asyncio.Event()
        await store.register(SEE)
        kept, assigned = earlier_life()
        async with supplying(store, Prompts(count=20), run, assigned=assigned) as supply:
            await supply.bring_back(0)
            supply.start()
            await eventually(lambda: waiting(store, 4))
            lease = await store.lease("see", requester="t")
            await store.commit(lease.ref())
            await eventually(lambda: store.puts == 2)
            late = supply.advance(1, kept)
            assert late == [Key(TRAINING, 0, 2, sample) for sample in (0, 1)]
            await store.drop(late, reason=STRAGGLER)  # it knows nothing of them yet
            store.gate.set()
            await eventually(lambda: waiting(store, 6))  # those of batch 1
            stats = await store.stats()
            assert (stats.rows, stats.rows_dropped) == (6, {STRAGGLER: 2})
            assert supply.rows_put == 12


async def test_group_of_an_earlier_life_that_is_dropped_before_any_is_admitted_is_replaced(store):
    await store.register(SEE)
    kept, assigned = earlier_life()
    async with supplying(store, Prompts(), config(), assigned=assigned) as supply:
        await supply.bring_back(0)
        prompts = supply.source.columns(list((await supply.source.again(kept)).values()))
        await store.put(prompts, keys=kept, samples=2, batch=0)
        await store.drop([Key(*kept[0], sample) for sample in (0, 1)], reason="too long")
        supply.start()
        await eventually(lambda: waiting(store, 4))
        lease = await store.lease("see", requester="t")
        assert {(info.batch, info.key.sequence) for info in lease.rows} == {(0, 1), (0, 2)}


async def test_group_whose_batch_is_trained_while_its_drop_is_written_down_is_not_replaced(store):
    await store.register(SEE)
    written, go_on = threading.Event(), threading.Event()

    def note(record):
        if "dropped" in record:
            written.set()
            assert go_on.wait(20)

    run = config(max_staleness=None, preset="async", extra_groups=1)
    async with supplying(store, Prompts(count=20), run, note=note) as supply:
        await eventually(lambda: waiting(store, 12))
        lease = await store.lease("see", requester="t", limit_rows=2)
        await store.drop([info.key for info in lease.rows], reason="too long")
        await eventually(written.is_set)
        supply.advance(1, [GroupKey(TRAINING, 0, 1), GroupKey(TRAINING, 0, 2)])
        go_on.set()
        await eventually(lambda: waiting(store, 16))  # batch 2 begins, and nothing of batch 0
        assert not supply.running.done()
        assert supply.rows_put == 18


async def test_rows_that_a_store_kept_and_trained_before_they_were_put_again_are_counted(store):
    await store.register(SEE)
    kept, assigned = earlier_life()
    async with supplying(store, Prompts(), config(), assigned=assigned) as supply:
        await supply.bring_back(0)
        supply.advance(1, kept)
        supply.start()
        await eventually(lambda: waiting(store, 4))
        assert supply.rows_put == 8


async def test_supply_that_only_drops_ends_the_run(store, caplog):
    await store.register(SEE)
    async with supplying(store, Prompts(), config()) as supply:

        async def drop_all():
            while not supply.running.done():
                lease = await store.lease("see", requester="t", wait_s=0.01)
                if lease is not None:
                    await store.drop([info.key for info in lease.rows], reason="too long")

        dropping = asyncio.create_task(drop_all())
        with pytest.raises(ServiceError, match="dropped within one step, the last: too long"):
            await asyncio.wait_for(supply.running, 20)
        await dropping
    warned = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warned) == 3  # of 21: hundreds of them would hide everything else


async def test_supply_evaluation_puts_held_out_prompts_outside_batches(store):
    await store.register(SEE)
    with ThreadPoolExecutor(1) as thread:
        supply = Supply(store, Prompts(), config(), thread)
        prompts = await supply.held_out()
        await supply.evaluate(1, prompts[:1], 4)
        await supply.evaluate(1, prompts[1:], 4, first=1)
        assert supply.rows_evaluated == 8
    lease = await store.lease("see", requester="t")
    assert {(info.batch, info.key.group) for info in lease.rows} == {
        (None, (EVALUATION, 1, 0)),
        (None, (EVALUATION, 1, 1)),
    }
    batch = await store.read(lease.ref(), ("answer",))
    assert set(batch["answer"]) == {"held out 0", "held out 1"}


async def test_supply_slow_prompts_leave_the_event_loop_free(store):
    await store.register(SEE)
    gate = threading.Event()

    class Slow(Prompts):
        def train(self, epoch):
            gate.wait()
            return super().train(epoch)

    async with supplying(store, Slow(), config()):
        for _ in range(20):
            await asyncio.sleep(0)
        assert (await store.stats()).rows == 0  # answered, though no prompt is there yet
        gate.set()
        await eventually(lambda: waiting(store, 4))


def broken():
    yield PromptRecord([1], {"answer": "a"})
    raise OSError("the disk is gone")


@pytest.mark.parametrize(
    ("made", "error", "expected"),
    [
        (broken, ServiceError, "prompts plugin 'any' failed: OSError: the disk is gone"),
        (lambda: 3, ServiceError, "prompts plugin 'any' failed: TypeError: "),
        (lambda: [None] * 9, DataError, "yields a malformed PromptRecord: AttributeError"),
        (lambda: [PromptRecord([1])] * 9, DataError, "malformed PromptRecord: KeyError"),
        (lambda: [PromptRecord([1.5], {"answer": ""})] * 9, DataError, "1.5 is not a whole number"),
        (lambda: [PromptRecord(["a"], {"answer": ""})] * 9, DataError, "malformed PromptRecord"),
    ],
)
@pytest.mark.parametrize("source", ["train", "evaluation"])
async def test_supply_prompts_that_break_their_contract_are_named(
    store, source, made, error, expected
):
    prompts = Prompts()
    setattr(prompts, source, lambda *_: made())
    async with supplying(store, prompts, config()) as supply:
        put = supply.running if source == "train" else put_held_out(supply)
        with pytest.raises(error) as found:
            await asyncio.wait_for(put, 10)
    assert expected in str(found.value)


async def put_held_out(supply):
    await supply.evaluate(0, await supply.held_out(), 1)


async def test_supply_without_prompts_says_so(store):
    async with supplying(store, Prompts(count=0), config()) as supply:
        with pytest.raises(DataError, match="has no training prompts in epoch 0"):
            await asyncio.wait_for(supply.running, 5)


@pytest.mark.parametrize(("unit", "there"), [("bytes", 80_000), ("rows", 3)], ids=["bytes", "rows"])
async def test_supply_batch_that_never_fits_is_refused_not_awaited(unit, there):
    """Short prompts would fit, so only here is it known."""
    async with InProcessDataStore(**{f"capacity_{unit}": there}) as store:
        run = config()  # 4 rows of 256 new tokens
        async with supplying(store, Prompts(length=3000), run) as supply:
            said = f"the data store holds {there} {unit}, but 1 batch.*raise its capacity_{unit}"
            with pytest.raises(ConfigError, match=said):
                await asyncio.wait_for(supply.running, 5)
