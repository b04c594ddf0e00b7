"""The trainer's steps on the in-process store, with the tabular trainer as the judge of updates."""

import asyncio
import dataclasses

import numpy as np
import pytest

from asyncflow_core import metrics
from asyncflow_core.batch import Batch, Column, GroupKey, Key
from asyncflow_core.errors import ServiceError, StalenessViolationError
from asyncflow_core.flow.working.fanout import Ranks
from asyncflow_core.flow.working.rank import TrainerRank
from asyncflow_core.flow.working.step import TrainSettings
from asyncflow_core.flow.working.train import TrainWorker
from asyncflow_core.parts import PartContext
from asyncflow_core.reference import plugin
from asyncflow_core.reference.tabular_trainer import TabularTrainer, TabularTrainerOptions
from asyncflow_core.reference.weight_sync import MemoryWeightSync
from asyncflow_core.registry import NoOptions, Registry
from asyncflow_core.services.data_store import CommitResult, Order, TaskSpec
from asyncflow_core.services.trainer import LossSpec
from asyncflow_core.testing.aio import eventually

VOCAB = 7
LOSS = LossSpec("tabular_ppo_clip")
READS = (
    *("prompt_ids", "response_ids", "loss_mask", "sampling"),
    *("behaviour_logprobs", "advantages"),
)
TRAIN = TaskSpec("train", READS, (), True, ("train",), Order.STEP)
GENERATE = TaskSpec(
    "generate",
    ("prompt_ids",),
    ("response_ids", "loss_mask", "sampling", "behaviour_logprobs", "versions"),
    order=Order.ADMITTED,
)
ADVANTAGE = TaskSpec("advantage", ("response_ids",), ("advantages",))

SETTINGS = TrainSettings(
    task=TRAIN,
    columns=READS,
    loss=LOSS,
    groups_per_step=4,
    group_size=2,
    updates_per_step=1,
    max_staleness=1,
    micro_batch_tokens=12,
    whole_batch=False,
    lease_s=60.0,
)


def new_trainer(registry):
    options = TabularTrainerOptions(vocab_size=VOCAB, positions=2, init_scale=1.0, lr=0.5)
    return TabularTrainer(options, PartContext(name="trainer-0", registry=registry))


@pytest.fixture(scope="session")
def registry():
    made = Registry([])
    made.add(plugin)
    return made


class Rows:
    """Makes rows that are ready to train, and remembers what they hold."""

    def __init__(self, store):
        self.store = store
        self.content = {}
        self.rng = np.random.default_rng(3)

    async def put(self, batch, groups, *, first=0, samples=2):
        keys = [GroupKey(0, 0, n) for n in range(first, first + groups)]
        prompts = Column.ragged([[n % VOCAB] for n in range(first, first + groups)], np.int32)
        await self.store.put(
            Batch({"prompt_ids": prompts}), keys=keys, samples=samples, batch=batch
        )

    async def finish(self, rows=None, *, version=0):
        """Generate and rate waiting rows (default: all)."""
        lease = await self.store.lease(
            "generate", requester="rollout", version=version, limit_rows=rows
        )
        await self.store.commit(lease.ref(), writes=self._generated(lease.rows, version))
        lease = await self.store.lease("advantage", requester="advantage")
        rated = Column.ragged([self.content[i.key]["advantages"] for i in lease.rows], np.float32)
        await self.store.commit(lease.ref(), writes=Batch({"advantages": rated}))

    def _generated(self, rows, version):
        made = []
        for info in rows:
            length = int(self.rng.integers(1, 4))
            made.append(
                {
                    "prompt_ids": np.array([info.key.sequence % VOCAB], np.int32),
                    "response_ids": self.rng.integers(0, VOCAB, length).astype(np.int32),
                    "behaviour_logprobs": -self.rng.uniform(1, 3, length).astype(np.float32),
                    "advantages": np.full(length, self.rng.normal(), np.float32),
                    "loss_mask": np.ones(length, np.uint8),
                    "versions": np.array([[version, length]], np.int32),
                }
            )
            self.content[info.key] = made[-1]
        columns = {
            name: Column.ragged([row[name] for row in made])
            for name in ("response_ids", "behaviour_logprobs", "loss_mask", "versions")
        }
        sampling = [{"temperature": 1.0, "max_new_tokens": 4}] * len(made)
        return Batch({**columns, "sampling": Column.objects(sampling)})

    def batch(self, keys):
        """These rows as one batch."""
        rows = [self.content[key] for key in keys]
        columns = {
            name: Column.ragged([row[name] for row in rows]) for name in READS if name != "sampling"
        }
        return Batch({**columns, "sampling": Column.objects([{"temperature": 1.0}] * len(rows))})


@pytest.fixture
async def rows(store):
    made = Rows(store)
    for task in (GENERATE, ADVANTAGE):
        await store.register(task)
    return made


@pytest.fixture
async def begin(store, registry):
    """Make a worker; `trained` collects the keys of its micro-batches, update by update."""
    opened = []

    async def call(**changes):
        trainer = new_trainer(registry)
        sync = MemoryWeightSync(NoOptions(), PartContext(name="sync"))
        for service in (trainer, sync):
            await service.open()
            opened.append(service)
        ranks = Ranks(TrainerRank(trainer, store, sync))
        settings = dataclasses.replace(SETTINGS, **changes)
        worker = TrainWorker(store, ranks, settings)
        worker.trainer = trainer
        worker.logits = lambda: trainer._model.logits
        await worker.start()
        return worker

    yield call
    for service in opened:
        await service.aclose()


async def expected_logits(registry, *batches):
    async with new_trainer(registry) as trainer:
        for batch in batches:
            await trainer.forward_backward(batch, LOSS, last=True)
            await trainer.optim_step()
        return trainer._model.logits


async def test_step_in_micro_batches_equals_one_update_on_the_batch(rows, begin, store, registry):
    worker = await begin()
    await rows.put(0, 4)
    await rows.finish()
    report = await worker.step(0)
    assert (report.version, report.rows, report.groups, report.updates) == (1, 8, 4, 1)
    expected = await expected_logits(registry, rows.batch(sorted(rows.content)))
    np.testing.assert_allclose(worker.logits(), expected, rtol=1e-12, atol=1e-12)
    assert report.tokens == sum(
        len(row["prompt_ids"]) + len(row["response_ids"]) for row in rows.content.values()
    )
    assert (report.staleness_sum, report.staleness_max) == (0, 0)
    assert {metrics.TRAINER_LOSS, metrics.TRAINER_GRAD_NORM, metrics.TRAINER_LR} <= {
        *report.metrics
    }
    stats = await store.stats()
    assert (stats.rows, stats.tasks["train"].committed) == (0, 8)


async def test_step_waits_for_late_groups_and_trains_early_ones_meanwhile(rows, begin, store):
    worker = await begin(micro_batch_tokens=1)
    await rows.put(0, 4)
    await rows.finish(2)
    step = asyncio.create_task(worker.step(0))
    await eventually(lambda: worker.trainer._weight > 0)
    assert not step.done()
    await rows.finish(4)
    await rows.finish()
    assert (await step).rows == 8


async def test_step_whole_batch_computes_nothing_before_all_is_there(rows, begin):
    worker = await begin(micro_batch_tokens=1, whole_batch=True)
    await rows.put(0, 4)
    await rows.finish(6)
    step = asyncio.create_task(worker.step(0))
    for _ in range(50):
        await asyncio.sleep(0)
    assert worker.trainer._weight == 0
    await rows.finish()
    assert (await step).rows == 8


async def test_step_with_two_updates_trains_equal_shares_once_each(rows, begin, store, registry):
    worker = await begin(updates_per_step=2)
    updates = _record_updates(worker)
    await rows.put(0, 4)
    await rows.finish()
    report = await worker.step(0)
    assert (report.updates, report.rows, report.groups) == (2, 8, 4)
    assert report.staleness_updates_max == 1  # the second update trains rows one update old
    assert [len({key.group for key in keys}) for keys in updates] == [2, 2]
    assert sorted(key for keys in updates for key in keys) == sorted(rows.content)
    expected = await expected_logits(registry, *(rows.batch(keys) for keys in updates))
    np.testing.assert_allclose(worker.logits(), expected, rtol=1e-12, atol=1e-12)


def _record_updates(worker):
    """The keys each update acknowledged."""
    updates, real = [], worker._leased.acknowledge

    async def acknowledge(held, version, tally):
        updates.append([row.info.key for row in held])
        await real(held, version, tally)

    worker._leased.acknowledge = acknowledge
    return updates


async def test_step_group_with_a_dropped_row_is_smaller_and_counts_as_one(rows, begin, store):
    worker = await begin()
    await rows.put(0, 4)
    await store.drop([Key(0, 0, 1, 1)], reason="too long")
    await rows.finish()
    report = await worker.step(0)
    assert (report.rows, report.groups) == (7, 4)


async def test_step_surplus_groups_are_given_back_for_the_next_update(rows, begin, store):
    """Smaller groups let more of them into a row limit than an update's share."""
    worker = await begin(updates_per_step=2)
    updates = _record_updates(worker)
    await rows.put(0, 4)
    await store.drop([Key(0, 0, 0, 1), Key(0, 0, 1, 1)], reason="too long")
    await rows.finish()
    given, real = [], store.release

    async def release(ref):
        given.append(len(ref.rows))
        await real(ref)

    store.release = release
    report = await worker.step(0)
    assert [len({key.group for key in keys}) for keys in updates] == [2, 2]
    assert (report.rows, report.groups) == (6, 4)
    assert given == [2]


async def test_step_dropped_group_is_replaced_in_its_batch(rows, begin, store):
    worker = await begin()
    await rows.put(0, 4)
    await rows.finish(6)
    step = asyncio.create_task(worker.step(0))
    await store.drop([Key(0, 0, 3, s) for s in (0, 1)], reason="too long")
    await rows.put(0, 1, first=9)
    await rows.finish()
    report = await step
    assert (report.rows, report.groups) == (8, 4)


async def test_step_lost_lease_repeats_the_update_and_gives_the_same(
    rows, begin, store, clock, registry, caplog
):
    worker = await begin()
    await rows.put(0, 4)
    await rows.finish()
    zeroed, real = [], store.renew

    async def renew(leases, *, lease_s):
        if not zeroed:  # the process stood still for longer than its leases
            clock.now += 61.0
        return await real(leases, lease_s=lease_s)

    async def zero_grad():
        zeroed.append(worker.trainer._weight)
        await zero()

    zero, worker.trainer.zero_grad = worker.trainer.zero_grad, zero_grad
    store.renew = renew
    report = await worker.step(0)
    assert (report.rows, report.updates) == (8, 1)
    assert len(zeroed) == 1
    assert zeroed[0] > 0
    assert "the update is repeated" in caplog.text
    expected = await expected_logits(registry, rows.batch(sorted(rows.content)))
    np.testing.assert_allclose(worker.logits(), expected, rtol=1e-12, atol=1e-12)
    counted = report.metrics[metrics.TRAINER_LOSS][1]
    assert counted == sum(len(row["response_ids"]) for row in rows.content.values())


async def test_step_one_of_two_leases_lost_keeps_the_other(rows, begin, store, clock, registry):
    worker = await begin(micro_batch_tokens=1)
    await rows.put(0, 4)
    await rows.finish(4)
    step = asyncio.create_task(worker.step(0))
    await eventually(lambda: worker.trainer._weight > 0)
    clock.now = 61.0  # the first lease is over, the second begins
    await rows.finish()
    assert (await step).rows == 8
    expected = await expected_logits(registry, rows.batch(sorted(rows.content)))
    np.testing.assert_allclose(worker.logits(), expected, rtol=1e-12, atol=1e-12)
    stats = (await store.stats()).tasks["train"]
    assert (stats.expired, stats.committed) == (1, 8)


async def test_step_lease_lost_after_the_update_is_acknowledged_and_trained_once(
    rows, begin, store, registry, caplog
):
    """A store whose process was started again knows no lease any more."""
    worker = await begin(updates_per_step=2)
    await rows.put(0, 4)
    await rows.finish()
    real, lost = store.commit, []

    async def commit(ref, **how):
        if worker.trainer.updates and not lost:
            lost.append(await store.evict("trainer"))
        return await real(ref, **how)

    worker.trainer.updates = 0
    update = worker.trainer.optim_step

    async def optim_step():
        worker.trainer.updates += 1
        return await update()

    worker.trainer.optim_step = optim_step
    store.commit = commit
    report = await worker.step(0)
    assert lost
    assert (report.rows, report.updates) == (8, 2)
    assert "acknowledged anew" in caplog.text
    stats = await store.stats()
    assert stats.tasks["train"].committed == 8
    assert stats.tasks["train"].ready == 0


async def test_step_row_dropped_before_it_is_read_trains_the_rest(rows, begin, store, registry):
    worker = await begin(whole_batch=True)
    await rows.put(0, 4)
    await rows.finish(6)
    step = asyncio.create_task(worker.step(0))
    await eventually(lambda: _held(store, 6))
    await store.drop([Key(0, 0, 1, 1)], reason="test")
    await rows.finish()
    report = await step
    assert (report.rows, report.groups) == (7, 4)
    keys = [key for key in rows.content if key != Key(0, 0, 1, 1)]
    expected = await expected_logits(registry, rows.batch(keys))
    np.testing.assert_allclose(worker.logits(), expected, rtol=1e-12, atol=1e-12)


async def test_step_waiting_longer_than_a_lease_keeps_it(rows, begin, store, clock):
    """Rows that are held unread while the step waits for the rest are still there to be read."""
    worker = await begin(whole_batch=True, lease_s=0.3)
    await rows.put(0, 4)
    await rows.finish(4)
    step = asyncio.create_task(worker.step(0))
    await eventually(lambda: _held(store, 4))
    for _ in range(4):  # together four times as long as a lease
        renewed = await _renewals(store)
        clock.now += 0.25
        await eventually(lambda before=renewed: _renewed_after(store, before))
    await rows.finish()
    assert (await step).rows == 8
    assert (await store.stats()).tasks["train"].expired == 0


async def _held(store, rows):
    return (await store.stats()).tasks["train"].leased == rows


async def _renewals(store):
    if not hasattr(store, "renewals"):
        store.renewals, real = 0, store.renew

        async def renew(leases, *, lease_s):
            store.renewals += 1
            return await real(leases, lease_s=lease_s)

        store.renew = renew
    return store.renewals


async def _renewed_after(store, before):
    return await _renewals(store) > before


async def test_step_whose_leases_cannot_be_renewed_ends_with_the_reason(rows, begin, store):
    """Going on would train rows that went to somebody else, again and again."""
    worker = await begin(whole_batch=True, lease_s=0.03)
    await rows.put(0, 4)
    await rows.finish(4)

    async def renew(leases, *, lease_s):
        raise ServiceError("the store is out of its mind")

    store.renew = renew
    with pytest.raises(ServiceError, match="out of its mind"):
        await asyncio.wait_for(worker.step(0), 20)


async def test_step_staleness_is_counted_per_row(rows, begin):
    worker = await begin()
    await rows.put(1, 4)
    await rows.finish(3, version=0)
    await rows.finish(version=1)
    report = await worker.step(1)
    assert (report.staleness_sum, report.staleness_max, report.staleness_updates_max) == (3, 1, 1)


async def test_step_too_stale_row_of_a_broken_store_raises(rows, begin, store):
    """The store's own order makes this impossible; the trainer checks it all the same."""
    worker = await begin(max_staleness=0)
    await rows.put(1, 4)
    await rows.finish(version=0)
    before = worker.logits().copy()
    with pytest.raises(StalenessViolationError) as found:
        await worker.step(1)
    assert "of step 1 has a token of version 0, staleness 1; max_staleness is 0" in str(found.value)
    assert (worker.logits() == before).all()


async def test_step_row_of_weights_that_are_not_there_yet_raises(rows, begin):
    """An engine that stamps a later version would make its rows look fresher than they are."""
    worker = await begin()
    await rows.put(0, 4)
    await rows.finish(version=77)
    with pytest.raises(StalenessViolationError, match="a token of version 77, staleness -77"):
        await worker.step(0)


async def test_step_row_dropped_under_training_raises(rows, begin, store):
    worker = await begin()
    await rows.put(0, 4)
    await rows.finish()

    async def commit(ref, *, writes=None, version=None):
        return CommitResult(committed=len(ref.rows) - 1, dropped=1)

    store.commit = commit
    with pytest.raises(ServiceError, match="1 rows of step 0 were dropped while they were trained"):
        await worker.step(0)


async def test_publish_and_retire_go_through_the_weight_sync(begin):
    worker = await begin()
    published = await worker.publish(0, 0)
    assert published.manifest.version == 0
    await worker.retire(0, 0)
    assert await worker.save_model("nowhere") is False
