"""The wait-for graph in lines, and the end of a run in which nothing moves."""

import pytest

from asyncflow_core.errors import ServiceTimeoutError
from asyncflow_core.flow.processes import waits as module
from asyncflow_core.flow.processes.waits import Batch, Waits
from asyncflow_core.services.data_store import StoreStats, TaskStats


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

    async def stats(self):
        return stats(rollout_0=3)


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
        async def stats(self):
            looks.append(now)
            now[0] += 10.0
            if len(looks) > 20:
                raise LookupError("enough")
            return await super().stats()

    waits = Waits(Store(), Batch(1, 4), idle_s=50.0, clock=lambda: now[0])
    waits.begin("step 1", step=1)
    with waits.holding("rollout-0 is started again"), pytest.raises(LookupError):
        await waits.run()
