"""Counters of replicas that come and go; the weight protocol while one is gone."""

import asyncio
from types import SimpleNamespace

import pytest

from asyncflow_core.config import WeightSyncConfig
from asyncflow_core.errors import PeerLostError
from asyncflow_core.flow.processes.replicas import Replicas
from asyncflow_core.flow.weights.switching import Switching
from asyncflow_core.services.rollout import RolloutStats, SwitchMode


class Replica:
    """Answers, until it is dead."""

    def __init__(self, name, **stats):
        self.name = name
        self.dead = False
        self.now = RolloutStats(**stats)
        self.serves = []

    async def stats(self):
        self.check()
        return self.now

    async def stage(self, published):
        self.check()
        return SimpleNamespace(checksum="sum", version=published.manifest.version, wall_s=0.0)

    async def commit(self, version, mode):
        self.check()
        self.serves.append(version)

    def check(self):
        if self.dead:
            raise PeerLostError("the connection is gone", service=self.name)


async def test_counters_go_on_over_lives_and_what_was_begun_is_known():
    first, other = (
        Replica("a", tokens_generated=10, busy_s=1.0, tokens_unfinished=4),
        Replica("b", tokens_generated=5, busy_s=2.0, tokens_lost=1),
    )
    replicas = Replicas({"a": first, "b": other})
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
    replicas = Replicas({"a": silent, "b": Replica("b", tokens_generated=5)})
    await replicas.look()
    silent.stats = asyncio.Event().wait
    assert (await replicas.totals()).tokens_generated == 15


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
