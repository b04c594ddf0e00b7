"""Counters of replicas that come and go; the weight protocol while one is gone."""

import asyncio
from types import SimpleNamespace

import pytest

from asyncflow_core.config import WeightSyncConfig
from asyncflow_core.errors import EngineError, PeerLostError, ServiceError
from asyncflow_core.flow.processes.control import WorkStats
from asyncflow_core.flow.processes.replicas import Replicas
from asyncflow_core.flow.weights.switching import Switching
from asyncflow_core.services.rollout import RolloutStats, SwitchMode
from asyncflow_core.testing.aio import eventually


class Replica:
    """Answers, until it is dead."""

    def __init__(self, name, **stats):
        self.name = name
        self.dead = False
        self.now = RolloutStats(**stats)
        self.worked = WorkStats(0.0, 0.0, 0)
        self.serves = []

    async def stats(self):
        self.check()
        return self.now

    async def work(self):
        self.check()
        return self.worked

    async def stage(self, published):
        self.check()
        return SimpleNamespace(checksum="sum", version=published.manifest.version, wall_s=0.0)

    async def commit(self, version, mode):
        self.check()
        self.serves.append(version)

    def check(self):
        if self.dead:
            raise PeerLostError("the connection is gone", service=self.name)


def of(replicas, *, timeout_s=1e9, **more):
    ended = []

    async def end(name, reason):
        ended.append((name, reason))

    made = Replicas(replicas, end, timeout_s=timeout_s, **more)
    made.ended = ended
    return made


async def test_counters_go_on_over_lives_and_what_was_begun_is_known():
    first, other = (
        Replica("a", tokens_generated=10, busy_s=1.0, tokens_unfinished=4),
        Replica("b", tokens_generated=5, busy_s=2.0, tokens_lost=1),
    )
    replicas = of({"a": first, "b": other})
    assert (await replicas.totals()).tokens_generated == 15
    first.dead = True
    assert (await replicas.totals()).tokens_generated == 15  # what it said last
    assert replicas.left("a") == 4
    replicas.back("a", Replica("a", tokens_generated=3, busy_s=0.5))
    totals = await replicas.totals()
    assert (totals.tokens_generated, totals.busy_s, totals.tokens_lost) == (18, 3.5, 1)
    assert replicas.count == 2


async def test_replica_that_owes_an_answer_holds_up_nobody(monkeypatch):
    monkeypatch.setattr("asyncflow_core.flow.processes.replicas._ANSWER_S", 0.01)
    silent = Replica("a", tokens_generated=10)
    replicas = of({"a": silent, "b": Replica("b", tokens_generated=5)})
    await replicas.look()
    silent.stats = asyncio.Event().wait
    assert (await replicas.totals()).tokens_generated == 15


async def test_replica_that_makes_no_progress_with_its_rows_is_ended_once(clock):
    names = ("hangs", "generates", "finishes", "idle")
    controls = {name: Replica(name) for name in names}
    replicas = of(controls, timeout_s=10.0, clock=clock)
    for second in range(16):
        clock.now = float(second)
        for name, control in controls.items():
            rows = second if name == "finishes" else 0
            control.worked = WorkStats(0.0, 0.0, rows, held=0 if name == "idle" else 3)
        controls["generates"].now = RolloutStats(tokens_generated=second)
        await replicas.look()
        await replicas.end_stuck()
        assert bool(replicas.ended) == (second >= 10)
    ((name, reason),) = replicas.ended
    assert name == "hangs"
    assert "finished none of the 3 rows it holds for 10 s (rollout.timeout_s)" in reason


async def test_replica_that_came_back_has_its_time_anew(clock):
    hangs = Replica("a")
    hangs.worked = WorkStats(0.0, 0.0, 0, held=1)
    replicas = of({"a": hangs}, timeout_s=10.0, clock=clock)
    await replicas.look()
    replicas.left("a")
    clock.now = 20.0
    await replicas.end_stuck()
    replicas.back("a", hangs)
    await replicas.look()
    clock.now = 29.0
    await replicas.end_stuck()
    assert replicas.ended == []
    clock.now = 30.0
    await replicas.end_stuck()
    assert [name for name, _ in replicas.ended] == ["a"]


async def test_replica_whose_engine_does_not_tell_its_tokens_is_known_by_its_rows(clock):
    async def broken():
        raise EngineError("no metrics here")

    silent = Replica("a")
    silent.stats = broken
    replicas = of({"a": silent}, timeout_s=10.0, clock=clock)
    for second in range(30):
        clock.now = float(second)
        silent.worked = WorkStats(0.0, 0.0, second // 8, held=1)
        await replicas.look()
        await replicas.end_stuck()
    assert replicas.ended == []


def weights(version):
    return SimpleNamespace(manifest=SimpleNamespace(version=version, checksum="sum", life=0))


async def retire(version, life):
    pass


@pytest.fixture
async def group():
    """A task group that ends with the test; no task of it may have failed."""
    made = asyncio.Event()

    async def hold():
        async with asyncio.TaskGroup() as group:
            groups.append(group)
            made.set()
            await asyncio.Event().wait()

    groups = []
    holding = asyncio.create_task(hold())
    await made.wait()
    yield groups[0]
    holding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await holding


async def test_replica_that_dies_while_it_takes_weights_catches_up_when_it_is_back(group):
    alive, dying = Replica("a"), Replica("b")
    switching = Switching(
        {"a": alive, "b": dying},
        SimpleNamespace(retire=retire),
        SwitchMode.DRAIN,
        group,
        WeightSyncConfig(plugin="memory", attempts=1),
    )
    switching.start()
    dying.dead = True
    switching.published(weights(1))
    await asyncio.sleep(0)
    switching.left("b")
    await switching.settled()  # nobody waits for one that is gone
    assert alive.serves == [1]
    switching.published(weights(2))
    back = Replica("b")
    switching.joined("b", back)
    await switching.settled()
    assert back.serves == [2]
    assert switching.failures == 0


async def test_replica_that_cannot_take_weights_is_ended_if_it_ever_served_any(group):
    ended = []

    async def end(name, reason):
        ended.append(reason)

    async def broken(published):
        raise EngineError("out of memory")

    replica = Replica("a")
    switching = Switching(
        {"a": replica},
        SimpleNamespace(retire=retire),
        SwitchMode.DRAIN,
        group,
        WeightSyncConfig(plugin="memory", attempts=1),
        end=end,
    )
    switching.start()
    switching.published(weights(1))
    await switching.settled()
    replica.stage = broken
    switching.published(weights(2))
    await eventually(lambda: ended)
    assert ended == ["a cannot be brought to weights version 2: out of memory"]
    assert switching.waiting() == []
    switching.left("a")
    back = Replica("a")
    switching.joined("a", back)
    await switching.settled()
    assert back.serves == [2]


@pytest.mark.parametrize("ends", [True, False])
async def test_replica_that_never_took_weights_ends_the_run(ends):
    async def end(name, reason):
        raise AssertionError(reason)

    async def broken(published):
        raise EngineError("another shape")

    async def run():
        async with asyncio.TaskGroup() as group:
            switching = Switching(
                {"a": replica},
                SimpleNamespace(retire=retire),
                SwitchMode.DRAIN,
                group,
                WeightSyncConfig(plugin="memory", attempts=1),
                end=end if ends else None,
            )
            switching.start()
            switching.published(weights(1))

    replica = Replica("a")
    replica.stage = broken
    with pytest.raises(ExceptionGroup) as found:
        await run()
    (error,) = found.value.exceptions
    assert isinstance(error, ServiceError)
    assert "a cannot be brought to weights version 1: another shape" in str(error)
