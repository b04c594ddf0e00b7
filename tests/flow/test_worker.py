"""The loop against the in-process store: no row is lost, none is done twice, limits hold."""

import asyncio

import numpy as np
import pytest

from asyncflow_core.batch import Batch, Column, Key
from asyncflow_core.errors import DataError, EngineError, ServiceError
from asyncflow_core.flow.working.worker import LeaseKeeper, Part, Worker, first_failure, read_rows
from asyncflow_core.parts import KEY_COLUMN
from asyncflow_core.services.data_store import Order, TaskSpec
from asyncflow_core.testing.aio import eventually

SCORE = TaskSpec("score", ("prompt_ids",), ("score",))
ECHO = TaskSpec("echo", ("prompt_ids",))
ADMITTED = TaskSpec("echo", ("prompt_ids",), order=Order.ADMITTED)


def score_all(seen):
    """Work that scores each row by its prompt, and remembers what it was given."""

    async def work(lease, batch):
        seen.append(batch)
        scores = Column.objects(int(ids[0]) for ids in batch["prompt_ids"])
        yield Part(lease.rows, Batch({"score": scores}))

    return work


def gated(gate, held, *, at_once=True):
    """Work that ends when the gate opens; `held` is the rows it has in hand."""

    async def work(lease, batch):
        held.update(info.key for info in lease.rows)
        await gate.wait()
        for part in [lease.rows] if at_once else [[info] for info in lease.rows]:
            held.difference_update(info.key for info in part)
            yield Part(part)

    return work


async def committed(store, task="echo"):
    return (await store.stats()).tasks[task].committed


async def test_worker_commits_every_row_with_its_own_columns(store, put, start):
    seen = []
    await store.register(TaskSpec("after", ("score",)))
    await start(SCORE, score_all(seen), rows_per_lease=3)
    await put(10, samples=2)
    await eventually(lambda: sum(batch.rows for batch in seen) == 20)
    lease = await store.lease("after", requester="test", wait_s=5)
    rows = list(lease.rows)
    while len(rows) < 20:
        rows += (await store.lease("after", requester="test", wait_s=5)).rows
    assert {info.key for info in rows} == {Key(0, 0, n, s) for n in range(10) for s in (0, 1)}
    batch = await store.read(lease.ref(), ("score",))
    assert list(batch["score"]) == [info.key.sequence % 7 for info in lease.rows]
    assert all(1 <= batch.rows <= 3 for batch in seen)
    keys = [tuple(key) for batch in seen for key in batch[KEY_COLUMN].array.tolist()]
    assert len(set(keys)) == len(keys) == 20
    assert seen[0][KEY_COLUMN].array.dtype == np.int64


async def test_worker_full_asks_no_more_until_rows_end(store, put, start):
    gate, held = asyncio.Event(), set()
    await start(ECHO, gated(gate, held), rows_in_flight=5)
    await put(12)
    await eventually(lambda: len(held) == 5)
    stats = await store.stats()
    assert (stats.tasks["echo"].leased, stats.tasks["echo"].ready) == (5, 7)
    assert stats.tasks["echo"].holders == {"w": 5}
    gate.set()
    await eventually(lambda: _all_done(store, 12))


async def test_worker_whole_group_over_its_limit_is_taken_alone(store, put, start):
    gate, held = asyncio.Event(), set()
    task = TaskSpec("echo", ("prompt_ids",), whole_groups=True)
    await start(task, gated(gate, held), rows_in_flight=2)
    await put(3, samples=4)
    await eventually(lambda: len(held) == 4)
    assert (await store.stats()).tasks["echo"].leased == 4
    gate.set()
    await eventually(lambda: _all_done(store, 12))


async def _all_done(store, rows, task="echo"):
    return await committed(store, task) == rows


async def test_worker_commits_each_part_at_once(store, put, start):
    second = asyncio.Event()

    async def work(lease, batch):
        yield Part(lease.rows[:1])
        await second.wait()
        yield Part(lease.rows[1:])

    await put(0)
    await start(ECHO, work)
    await put(4)
    await eventually(lambda: _all_done(store, 1))
    assert (await store.stats()).tasks["echo"].leased == 3
    second.set()
    await eventually(lambda: _all_done(store, 4))


async def test_worker_rows_left_over_are_given_back(store, put, start):
    rounds = []

    async def work(lease, batch):
        rounds.append(len(lease.rows))
        yield Part(lease.rows[:2])

    await start(ECHO, work, rows_in_flight=8)
    await put(6)
    await eventually(lambda: _all_done(store, 6))
    assert sum(rounds) > 6


async def test_worker_drop_takes_rows_out_for_everybody(store, put, start):
    async def work(lease, batch):
        yield Part(lease.rows[:1], drop="too long")
        yield Part(lease.rows[1:])

    await start(ECHO, work)
    await put(3)
    await eventually(lambda: _all_done(store, 2))
    assert (await store.stats()).rows_dropped == {"too long": 1}


async def test_worker_failing_work_ends_it_and_gives_rows_back(store, put, start):
    async def work(lease, batch):
        yield Part(lease.rows[:1])
        raise EngineError("the engine fell over")

    worker = await start(ECHO, work, rows_in_flight=4)
    await put(4)
    with pytest.raises(EngineError, match="fell over"):
        await worker.running
    stats = (await store.stats()).tasks["echo"]
    assert (stats.committed, stats.ready, stats.leased) == (1, 3, 0)
    seen = set()
    await start(ECHO, gated(_open(), seen), requester="other")
    await eventually(lambda: _all_done(store, 4))


def _open():
    gate = asyncio.Event()
    gate.set()
    return gate


async def test_worker_whose_work_is_cancelled_from_within_ends_and_says_so(store, put, start):
    async def work(lease, batch):
        yield Part(lease.rows[:1])
        inner = asyncio.create_task(asyncio.sleep(60))
        inner.cancel()
        await inner

    worker = await start(ECHO, work, rows_in_flight=4)
    await put(4)
    with pytest.raises(ServiceError, match=r"^w: its work on 3 rows was cancelled, and nobody"):
        await worker.running
    assert (await store.lease("echo", requester="other")).rows


async def test_worker_warns_of_the_first_drops_of_a_cause_and_drops_all(store, put, start, caplog):
    async def work(lease, batch):
        yield Part(lease.rows, drop=f"refused: row {lease.rows[0].key}")

    await start(ECHO, work, rows_in_flight=1)
    await put(8)
    await eventually(lambda: _dropped(store, {"refused": 8}))
    assert sum("w drops 1 rows: refused" in text for text in caplog.messages) == 3


async def _dropped(store, expected):
    return (await store.stats()).rows_dropped == expected


async def test_worker_failed_commit_ends_it_and_gives_rows_back(store, put, start):
    async def work(lease, batch):
        yield Part(lease.rows, Batch({"other": Column.objects([1] * len(lease.rows))}))

    worker = await start(SCORE, work)
    await put(2)
    with pytest.raises(DataError, match=r"^w: .*score"):  # says whose columns they were
        await worker.running
    assert (await store.stats()).tasks["score"].ready == 2


async def test_worker_lost_lease_goes_on_and_rows_are_done_by_another(store, put, start, clock):
    gate, held = asyncio.Event(), set()
    first = await start(ECHO, gated(gate, held), rows_in_flight=3, lease_s=60.0)
    await put(3)
    await eventually(lambda: len(held) == 3)
    clock.now = 100.0
    done = set()
    await start(ECHO, gated(_open(), done), requester="other")
    await eventually(lambda: _all_done(store, 3))
    gate.set()
    await put(2, first=3)
    await eventually(lambda: _all_done(store, 5))
    assert not first.running.done()
    assert (await store.stats()).tasks["echo"].expired == 1


async def test_worker_lost_lease_stops_its_work_before_anything_else(store, put, start, clock):
    """An engine that went on with rows of others would be slower for nobody's good."""
    closed, when_released, release = [], [], store.release

    async def work(lease, batch):
        try:
            clock.now += 0.0 if closed else 100.0
            for info in lease.rows:
                yield Part([info])
        finally:
            closed.append(lease.lease_id)

    async def released(ref):
        when_released.append(ref.lease_id in closed)
        await release(ref)

    store.release = released
    await start(ECHO, work, rows_in_flight=3)
    await put(3)
    await eventually(lambda: _all_done(store, 3))
    assert when_released == [True]


async def test_worker_row_dropped_before_it_is_read_frees_the_rest(store, put, start, caplog):
    """The read of such a lease is refused whole; its other rows are done all the same.

    Where a policy drops groups that is everyday, and no warning.
    """
    await start(ECHO, gated(_open(), set()))
    real, dropped = store.read, []

    async def read(ref, columns):
        if not dropped:
            dropped.append(await store.drop([Key(0, 0, 1, 0)], reason="test"))
        return await real(ref, columns)

    store.read = read
    await put(3)
    await eventually(lambda: _all_done(store, 2))
    assert dropped == [1]
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


async def test_worker_version_change_while_waiting_loses_no_rows(store, put, start):
    version = 0
    seen = set()
    worker = await start(ADMITTED, gated(_open(), seen), version=lambda: version)
    for step in range(6):
        await put(4, batch=step + 1, first=4 * step)  # a bound of 1: served at version `step`
        if step % 2:  # rows and version at the same moment
            await asyncio.sleep(0)
        version = step
        worker.version_changed()
        worker.version_changed()
    await eventually(lambda: _all_done(store, 24))
    stats = (await store.stats()).tasks["echo"]
    assert (stats.ready, stats.leased, stats.expired) == (0, 0, 0)


async def test_worker_version_change_while_rows_are_on_their_way_loses_none(store, put, start):
    """A remote store's answer takes a while; the rows in it are handed out already."""
    real, changed = store.lease, []

    async def lease(*arguments, **named):
        found = await real(*arguments, **named)
        if found is not None and len(changed) < 3:
            changed.append(found)
            worker.version_changed()
        for _ in range(20):
            await asyncio.sleep(0)
        return found

    store.lease = lease
    worker = await start(ADMITTED, gated(_open(), set()), version=lambda: 0)
    await put(6, batch=0)
    await eventually(lambda: _all_done(store, 6))
    assert len(changed) == 3


async def test_worker_asks_with_its_version_and_gets_no_later_batch(store, put, start):
    version, batches = 0, []

    async def work(lease, batch):
        batches.extend(info.batch for info in lease.rows)
        yield Part(lease.rows)

    worker = await start(ADMITTED, work, version=lambda: version)
    await put(2, batch=2)
    await put(2, batch=1, first=2)
    await eventually(lambda: _all_done(store, 2))
    worker.version_changed()
    await put(1, batch=1, first=4)
    await eventually(lambda: _all_done(store, 3))
    assert batches == [1, 1, 1]
    version = 1
    worker.version_changed()
    await eventually(lambda: _all_done(store, 5))
    assert batches == [1, 1, 1, 2, 2]


async def test_workers_of_one_task_share_its_rows(store, put, start):
    gate, mine, theirs = asyncio.Event(), set(), set()
    await start(ECHO, gated(gate, mine), rows_in_flight=4)
    await start(ECHO, gated(gate, theirs), rows_in_flight=4, requester="v")
    await put(8)
    await eventually(lambda: len(mine) == len(theirs) == 4)
    assert not mine & theirs
    gate.set()
    await eventually(lambda: _all_done(store, 8))


async def test_worker_cancelled_stops_its_work_and_leaves_no_task(store, put):
    held = set()
    worker = Worker(store, ECHO, gated(asyncio.Event(), held), requester="w", rows_in_flight=2)
    await worker.register()
    before = asyncio.all_tasks()
    running = asyncio.create_task(worker.run())
    await put(2)
    await eventually(lambda: len(held) == 2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert asyncio.all_tasks() == before
    stats = (await store.stats()).tasks["echo"]
    assert (stats.ready, stats.leased, stats.holders) == (2, 0, {})  # at once, not at expiry


async def test_worker_that_failed_may_run_again(store, put):
    failed = []

    async def work(lease, batch):
        if not failed:
            failed.append(lease)
            raise EngineError("out of memory")
        yield Part(lease.rows)

    worker = Worker(store, ECHO, work, requester="w", rows_in_flight=2)
    await worker.register()
    await put(5)
    with pytest.raises(EngineError):
        await worker.run()
    running = asyncio.create_task(worker.run())
    await eventually(lambda: _all_done(store, 5))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_keeper_renews_what_is_held_and_forgets_what_is_lost(store, put, clock, caplog):
    await store.register(ECHO)
    await put(4)
    kept, lost = [
        await store.lease("echo", requester="t", limit_rows=2, lease_s=s) for s in (60, 1)
    ]
    clock.now = 30.0
    keeper = LeaseKeeper(store, 0.03)
    for lease in (kept, lost):
        keeper.hold(lease.lease_id)
    running = asyncio.create_task(keeper.run())
    await eventually(lambda: f"leases [{lost.lease_id}] are lost" in caplog.text)
    clock.now = 61.0
    keeper.let_go(kept.lease_id)
    running.cancel()
    assert (await store.stats()).tasks["echo"].expired >= 1


async def test_read_rows_adds_the_keys(store, put):
    await store.register(ECHO)
    await put(2, samples=2)
    lease = await store.lease("echo", requester="t")
    batch = await read_rows(store, lease, ("prompt_ids",))
    assert batch[KEY_COLUMN].array.tolist() == [list(info.key) for info in lease.rows]


def test_first_failure_of_nested_groups_is_the_innermost_first():
    wanted = EngineError("first")
    group = ExceptionGroup("a", [ExceptionGroup("b", [wanted]), ValueError("second")])
    assert first_failure(group) is wanted


async def test_workers_with_shares_get_rows_by_their_keys_whoever_is_faster(store, put, start):
    done = {0: [], 1: []}

    def work(number):
        async def finish(lease, batch):
            done[number] += [(info.key.sequence, info.key.sample) for info in lease.rows]
            yield Part(lease.rows)

        return finish

    spec = TaskSpec("see", ("prompt_ids",))
    for number in (0, 1):
        await start(spec, work(number), requester=f"w-{number}", share=(number, 2))
    await put(6, samples=3)
    await eventually(lambda: sum(map(len, done.values())) == 18)
    for number, keys in done.items():
        assert sorted(keys) == [(n, s) for n in range(6) for s in range(3) if (n + s) % 2 == number]


async def test_worker_with_a_share_is_not_held_up_by_rows_of_one_that_has_no_room(
    store, put, start
):
    never, held, done = asyncio.Event(), set(), set()

    async def finish(lease, batch):
        done.update(info.key.sequence for info in lease.rows)
        yield Part(lease.rows)

    spec = TaskSpec("see", ("prompt_ids",))
    full = {"rows_in_flight": 1, "share": (0, 2)}
    await start(spec, gated(never, held), requester="w-0", **full)
    await put(1)
    await eventually(lambda: len(held) == 1)
    await start(spec, finish, requester="w-1", rows_in_flight=1, share=(1, 2))
    await put(40)
    await eventually(lambda: done == set(range(1, 41, 2)))
