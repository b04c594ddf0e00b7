"""The wait-for graph in lines, and the end of a run in which nothing moves."""

import asyncio

import pytest

from asyncflow_core.errors import ServiceTimeoutError
from asyncflow_core.flow.processes import waits as module
from asyncflow_core.flow.processes.waits import Batch, Waits, said
from asyncflow_core.services.data_store import StoreStats, TaskStats
from asyncflow_core.testing.aio import eventually


def stats(*, trained=0, **holders):
    tasks = {
        "rollout": TaskStats(holders={n.replace("_", "-"): r for n, r in holders.items()}),
        "reward": TaskStats(),
        "train": TaskStats(committed=trained),
    }
    return StoreStats(tasks=tasks)


@pytest.fixture
def now():
    return [100.0]


@pytest.fixture
def waits(now):
    return Waits(None, Batch(groups=8, size=4), clock=lambda: now[0])


def test_step_names_the_groups_it_lacks_and_who_holds_them(waits, now):
    waits.begin("step 31", step=31)
    task = TaskStats(committed=960, holders={"trainer": 24})
    there = StoreStats(tasks={**stats(rollout_3=8).tasks, "train": task})
    waits.lines(there)
    now[0] += 41.0
    assert waits.lines(there) == [
        "trainer step 31 waits for 2 groups held by rollout-3 since 41 s",
        "rollout: 8 rows held by rollout-3, none finished since 41 s",
    ]


def test_step_with_all_its_groups_is_trained(waits, now):
    waits.begin("step 2", step=2)
    waits.lines(stats(trained=32))
    now[0] += 1.0
    (line,) = waits.lines(stats(trained=64))
    assert line == "trainer trains step 2 since 0 s"


def test_rows_that_nobody_takes_and_whatever_is_held_are_named(waits, now):
    waits.begin("the evaluation", lambda: ["rollout-1 is staging version 3, 5 s left"])
    there = StoreStats(waiting_puts=1, tasks={"reward": TaskStats(ready=4)})
    with waits.holding("rollout-0 is started again"):
        waits.lines(there)
        now[0] += 7.0
        assert waits.lines(there) == [
            "the evaluation: since 7 s",
            "rollout-1 is staging version 3, 5 s left",
            "rollout-0 is started again since 7 s",
            "reward: 4 rows ready that nobody takes since 7 s",
            "prompts wait for room in the data store since 7 s",
        ]
    assert not any("started again" in line for line in waits.lines(there))


class Still:
    """A store in which nothing moves."""

    async def stats(self, *, drops_after):
        return stats(rollout_0=3)


async def test_what_takes_long_where_no_graph_is_yet_is_said_until_it_ends(monkeypatch, caplog):
    monkeypatch.setattr(module, "SAY_AFTER_S", 0.01)
    async with said("the store is being opened"):
        await eventually(lambda: caplog.text.count("the store is being opened since") >= 2)
    count = len(caplog.records)
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(caplog.records) == count
    assert len(asyncio.all_tasks()) == 1


class Silent:
    """A store that never answers, and lives."""

    async def stats(self, *, drops_after):
        await asyncio.Event().wait()


async def test_store_that_never_answers_is_said_and_then_ends_the_run(monkeypatch, caplog):
    monkeypatch.setattr(module, "SAY_AFTER_S", 0.02)
    waits = Waits(Silent(), Batch(1, 4), idle_s=0.1)
    waits.begin("step 1", step=1)
    with pytest.raises(ServiceTimeoutError, match=r"store did not answer.*waited for: step 1"):
        await asyncio.wait_for(waits.run(), 20)
    assert "the data store does not answer since" in caplog.text


async def test_run_in_which_nothing_moves_ends_and_says_who_holds_it(monkeypatch):
    monkeypatch.setattr(module, "SAY_AFTER_S", 0.3)
    waits = Waits(Still(), Batch(1, 4), idle_s=0.1)
    waits.begin("step 1", step=1)
    with pytest.raises(ServiceTimeoutError, match=r"nothing moved for 0.1 s.*held by rollout-0"):
        await waits.run()


async def test_what_starts_has_a_deadline_of_its_own(monkeypatch, now):
    monkeypatch.setattr(module, "SAY_AFTER_S", 0.03)
    looks = []

    class Store(Still):
        async def stats(self, *, drops_after):
            looks.append(now)
            now[0] += 10.0
            if len(looks) > 20:
                raise LookupError("enough")
            return await super().stats(drops_after=drops_after)

    waits = Waits(Store(), Batch(1, 4), idle_s=50.0, clock=lambda: now[0])
    waits.begin("step 1", step=1)
    with waits.holding("rollout-0 is started again"), pytest.raises(LookupError):
        await waits.run()
