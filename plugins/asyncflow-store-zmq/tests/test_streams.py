"""The blocking client, its reader and its writer."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from asyncflow_core.batch import GroupKey
from asyncflow_core.errors import (
    ConfigError,
    DataError,
    LeaseLostError,
    PeerLostError,
    ServiceClosedError,
    ServiceTimeoutError,
)
from asyncflow_core.services.data_store import TaskSpec
from asyncflow_core.testing.data_store import prompts, rewards
from asyncflow_store_zmq.blocking import BlockingStore
from asyncflow_store_zmq.memory import Call, NoAnswerError

LOG = TaskSpec("log", ("prompt_ids",))
SCORE = TaskSpec("score", ("prompt_ids",), ("reward",))


def keys(first, count):
    return [GroupKey(0, 0, first + i) for i in range(count)]


@pytest.fixture
async def use(serve):
    """Run a function with a blocking store on a thread."""
    async with serve() as options:

        def call(function):
            with BlockingStore(options["connect"], token=options["token"]) as store:
                return function(store)

        yield lambda function: asyncio.to_thread(call, function)


@pytest.mark.parametrize("prefetch_rows", [0, 3, 64])
async def test_reader_with_total_closes_exactly_at_it(use, prefetch_rows):
    def run(store):
        store.register(LOG)
        store.put(prompts(20), keys=keys(0, 20))
        reader = store.reader(
            "log", ["prompt_ids"], requester="r", limit_rows=4, total_rows=13,
            prefetch_rows=prefetch_rows,
        )  # fmt: skip
        sizes = []
        for item in reader:
            sizes.append(len(item.rows))
            for info, ids in zip(item.rows, item.batch["prompt_ids"], strict=True):
                np.testing.assert_array_equal(ids, np.arange(info.key.sequence + 1))
            reader.commit(item)
        reader.close()
        return sizes, store.stats()

    sizes, stats = await use(run)
    assert sum(sizes) == 13
    assert max(sizes) <= 4
    assert (stats.rows, stats.tasks["log"].committed, stats.tasks["log"].leased) == (7, 13, 0)


@pytest.mark.parametrize("prefetch_rows", [0, 64])
@pytest.mark.parametrize(("limit_rows", "sizes"), [(7, [6, 6, 6, 6]), (3, [3] * 8), (2, [3] * 8)])
async def test_reader_of_whole_groups_cuts_between_them_and_closes_at_the_total(
    use, prefetch_rows, limit_rows, sizes
):
    def run(store):
        store.register(TaskSpec("log", ("prompt_ids",), whole_groups=True))
        store.put(prompts(10), keys=keys(0, 10), samples=3)
        reader = store.reader(
            "log", ["prompt_ids"], requester="r", limit_rows=limit_rows, total_rows=24,
            prefetch_rows=prefetch_rows,
        )  # fmt: skip
        found = []
        for item in reader:
            groups = [info.key.sequence for info in item.rows]
            assert all(groups.count(group) == 3 for group in groups)
            found.append(len(item))
            reader.commit(item)
        reader.close()
        return found, store.stats()

    found, stats = await use(run)
    assert found == sizes
    assert (stats.rows, stats.tasks["log"].committed, stats.tasks["log"].leased) == (6, 24, 0)


async def test_reader_of_whole_groups_ends_before_the_group_beyond_its_total(use):
    def run(store):
        store.register(TaskSpec("log", ("prompt_ids",), whole_groups=True))
        store.put(prompts(3), keys=keys(0, 3), samples=4)
        total = store.reader("log", ["prompt_ids"], requester="r", limit_rows=4, total_rows=9)
        rows = [len(item) for item in total]
        with pytest.raises(ConfigError, match="at least one group"):
            list(store.reader("log", ["prompt_ids"], requester="r", limit_rows=4, total_rows=3))
        return rows, store.stats().tasks["log"]

    rows, stats = await use(run)
    assert rows == [4, 4]
    assert (stats.leased, stats.ready) == (8, 4)


async def test_reader_by_tokens_cuts_whole_groups_between_them(use):
    def run(store):
        store.register(TaskSpec("log", ("prompt_ids",), whole_groups=True))
        store.put(prompts(4), keys=keys(0, 4), samples=2)  # 2, 4, 6 and 8 tokens
        reader = store.reader(
            "log", ["prompt_ids"], requester="r", limit_rows=8, limit_tokens=7, total_rows=8
        )
        return [[info.tokens for info in item.rows] for item in reader]

    assert await use(run) == [[1, 1, 2, 2], [3, 3], [4, 4]]


async def test_reader_by_tokens_keeps_the_budget(use):
    def run(store):
        store.register(LOG)
        store.put(prompts(12), keys=keys(0, 12))  # of 1 to 12 tokens
        reader = store.reader("log", ["prompt_ids"], requester="r", limit_tokens=10, total_rows=12)
        return [[info.tokens for info in item.rows] for item in reader]

    tokens = await use(run)
    assert sum(map(len, tokens)) == 12
    assert all(sum(part) <= 10 or len(part) == 1 for part in tokens)


async def test_reader_commit_of_lost_lease_is_raised(use):
    def run(store):
        store.register(LOG)
        store.put(prompts(2), keys=keys(0, 2))
        reader = store.reader("log", ["prompt_ids"], requester="r", limit_rows=1, prefetch_rows=0)
        item = next(reader)
        store.release(item.ref)
        reader.commit(item)
        with pytest.raises(LeaseLostError):
            reader.close()

    await use(run)


async def test_reader_closed_early_gives_back_what_was_ahead(use):
    def run(store):
        store.register(SCORE)
        store.put(prompts(10), keys=keys(0, 10))
        reader = store.reader("score", ["prompt_ids"], requester="r", limit_rows=2)
        reader.commit(next(reader), rewards(2))
        reader.close()
        return store.stats().tasks["score"]

    stats = await use(run)
    assert (stats.committed, stats.leased, stats.ready) == (2, 0, 8)


async def test_reader_without_rows_ends_after_its_wait(use):
    def run(store):
        store.register(LOG)
        return list(store.reader("log", ["prompt_ids"], requester="r", limit_rows=2, wait_s=0.05))

    assert await use(run) == []


async def test_reader_with_absurd_limits_refused(use):
    def run(store):
        with pytest.raises(ConfigError):
            store.reader("log", ["prompt_ids"], requester="r", limit_rows=0)

    await use(run)


async def test_writer_flush_tells_what_was_stored(use):
    def run(store):
        store.register(LOG)
        writer = store.writer(samples=2, in_flight=3)
        for first in (0, 4, 8, 4):
            writer.put(prompts(4), keys=keys(first, 4))
        return writer.flush(), store.stats().rows

    result, rows = await use(run)
    assert (result.stored, result.known, rows) == (12, 4, 24)


async def test_writer_refusal_is_raised_at_flush(use):
    def run(store):
        writer = store.writer()
        writer.put(prompts(1), keys=keys(0, 1))  # no task sees it
        with pytest.raises(DataError):
            writer.flush()

    await use(run)


@pytest.mark.parametrize("tcp", [False, True], ids=["ipc", "tcp"])
async def test_writer_goes_on_after_a_put_that_found_no_room_in_time(serve, tcp):
    def run(store):
        store.register(LOG)
        writer = store.writer(wait_s=0.05, in_flight=8)
        writer.put(prompts(4), keys=keys(0, 4))
        writer.put(prompts(2), keys=keys(4, 2))  # it is full
        writer.put(prompts(1), keys=keys(6, 1))
        for _ in range(2):
            with pytest.raises(ServiceTimeoutError, match="for room"):
                writer.flush()
        store.commit(store.lease("log", requester="r").ref())
        writer.put(prompts(3), keys=keys(4, 3))
        return writer.flush(), store.stats()

    async with serve(capacity_rows=4, tcp=tcp) as options:

        def use():
            with BlockingStore(options["connect"], token=options["token"]) as store:
                return run(store)

        result, stats = await asyncio.to_thread(use)
    assert (result.stored, result.known) == (7, 0)
    assert (stats.rows, stats.waiting_puts) == (3, 0)


def lend():
    """Steps: memory of the smallest size; shard, slot and bytes."""
    return (yield Call("store.lend", [1, []]))


async def test_puts_that_find_no_room_in_time_keep_no_memory(serve):
    def run(options):
        with BlockingStore(options["connect"], token=options["token"]) as store:
            store.register(LOG)
            store.put(prompts(2), keys=keys(0, 2))
        with BlockingStore(options["connect"], token=options["token"]) as store:
            slots = [store._connection.run(lend())[1]]
            for _ in range(20):
                with pytest.raises(ServiceTimeoutError, match="for room"):
                    store.put(prompts(1), keys=keys(2, 1), wait_s=0.001)
            slots.append(store._connection.run(lend())[1])
            return slots

    async with serve(capacity_rows=2) as options:
        slots = await asyncio.to_thread(run, options)
    assert slots[1] - slots[0] < 20


@pytest.mark.parametrize("prefetch_rows", [0, 3, 64])
async def test_reader_whose_steps_fail_anywhere_still_reads_its_total(use, prefetch_rows):
    """As the n-th message of a reader finds the store gone, for every n."""

    def run(store):
        store.register(LOG)
        connection, number = store._connection, 0
        whole = connection._do

        def read(fails):
            nonlocal number
            store.put(prompts(20), keys=keys(100 * fails, 20))
            reader = store.reader(
                "log", ["prompt_ids"], requester="r", limit_rows=4, total_rows=13,
                prefetch_rows=prefetch_rows,
            )  # fmt: skip
            number = 0

            def do(step):
                nonlocal number
                number += 1
                if number == fails:
                    raise PeerLostError("gone for this once")
                return whole(step)

            connection._do = do
            rows, over = 0, False
            while not over:
                try:
                    item = next(reader, None)
                    over = item is None
                    if item is not None:
                        rows += len(item)
                        reader.commit(item)
                except PeerLostError:
                    assert number == fails
            reader.close()
            connection._do = whole
            left = store.lease("log", requester="s")
            store.commit(left.ref())
            return rows, len(left.rows), store.stats().tasks["log"].leased

        fails, found = 0, []
        while number >= fails:
            found.append(read(fails))
            fails += 1
        return found

    found = await use(run)
    assert len(found) >= 6
    assert set(found) == {(13, 7, 0)}


async def test_blocking_store_closed_says_so(use):
    def run(store):
        store.close()
        with pytest.raises(ServiceClosedError):
            store.stats()

    await use(run)


async def test_rows_lost_before_they_were_read_still_count_to_the_total(use):
    def run(store):
        store.register(LOG)
        store.put(prompts(4), keys=keys(0, 4))
        late = store.reader("log", ["prompt_ids"], requester="r", total_rows=4, lease_s=1e-9)
        for _ in range(3):
            with pytest.raises(LeaseLostError):
                next(late)
        late.close()
        reader = store.reader("log", ["prompt_ids"], requester="r", total_rows=4)
        return [len(item) for item in reader]

    assert sum(await use(run)) == 4


async def test_reader_whose_answers_come_late_forgets_no_commit_they_carry(use):
    def run(store):
        store.register(LOG)
        store.put(prompts(20), keys=keys(0, 20))
        reader = store.reader("log", ["prompt_ids"], requester="r", limit_rows=3, total_rows=20)
        connection, waited, late = store._connection, set(), 0
        patient = connection.wait

        def wait(number, call):
            """The first time, not a moment."""
            if number in waited or call.method != "store.turn":
                return patient(number, call)
            waited.add(number)
            raise NoAnswerError("not yet", service="store")

        connection.wait = wait
        seen = []
        while len(seen) < 20:
            try:
                item = next(reader)
            except ServiceTimeoutError:
                late += 1
                continue
            seen += [info.key.sequence for info in item.rows]
            reader.commit(item)
        for _ in range(20):
            try:
                reader.close()
            except ServiceTimeoutError:
                late += 1
            else:
                break
        return seen, late, store.stats()

    seen, late, stats = await use(run)
    assert seen == list(range(20))
    assert late
    assert (stats.rows, stats.tasks["log"].committed, stats.tasks["log"].leased) == (0, 20, 0)


async def test_flush_tells_of_commits_though_nothing_is_ready_and_the_reader_goes_on(use):
    def run(store):
        store.register(LOG)
        store.put(prompts(1), keys=keys(0, 1))
        reader = store.reader("log", ["prompt_ids"], requester="r", limit_rows=4, wait_s=3600.0)
        reader.commit(next(reader))
        reader.flush()  # or it would take the hour
        assert store.stats().rows == 0
        store.put(prompts(2), keys=keys(1, 2))
        reader.commit(next(reader))
        reader.close()
        return store.stats().tasks["log"].committed

    assert await asyncio.wait_for(use(run), 60) == 3


async def test_flush_does_not_ask_for_more_when_it_meets_rows_on_their_way(use):
    def run(store):
        store.register(LOG)
        store.put(prompts(2), keys=keys(0, 2))
        how = {"requester": "r", "limit_rows": 2, "wait_s": 3600.0, "prefetch_rows": 0}
        reader = store.reader("log", ["prompt_ids"], **how)
        item = next(reader)  # the next two are asked for already
        store.put(prompts(2), keys=keys(2, 2))
        reader.commit(item)
        reader.flush()
        assert store.stats().rows == 2
        reader.commit(next(reader))
        reader.close()
        return store.stats().tasks["log"].committed

    assert await asyncio.wait_for(use(run), 60) == 4


async def test_call_that_was_given_up_leaves_nothing_behind(use, monkeypatch):
    def run(store):
        store.register(LOG)
        with monkeypatch.context() as patch:
            patch.setattr("asyncflow_store_zmq.connection._TIMEOUT_S", -1.2)
            for _ in range(3):
                with pytest.raises(ServiceTimeoutError):
                    store.lease("log", requester="a", wait_s=0.25)
        assert store.lease("log", requester="a", wait_s=0.3) is None  # late answers came meanwhile
        client = store._connection._clients[-1]
        return client._waiting, client._results

    assert await use(run) == (set(), {})
